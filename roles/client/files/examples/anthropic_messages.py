# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A streamed message with the Python package anthropic: kimi-k3-run python anthropic_messages.py "Say hello" """

import os
import sys

from anthropic import Anthropic

# Address and key come from ANTHROPIC_BASE_URL and ANTHROPIC_AUTH_TOKEN, which is sent as a bearer token.
client = Anthropic()
model = os.environ["ANTHROPIC_MODEL"]
messages = [{"role": "user", "content": " ".join(sys.argv[1:]) or "Say hello."}]
counted = client.messages.count_tokens(model=model, messages=messages)
print(f"{counted.input_tokens} tokens in", file=sys.stderr)
with client.messages.stream(
    model=model, messages=messages, max_tokens=int(os.environ.get("MAX_TOKENS", "256"))
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
