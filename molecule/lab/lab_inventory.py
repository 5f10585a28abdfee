def write(settings, revision):
    return "none"


def remove(settings):
    pass
