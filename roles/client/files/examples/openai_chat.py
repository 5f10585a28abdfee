# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A streamed chat with the Python package openai: kimi-k3-run python openai_chat.py "Say hello" """

import os
import sys

from openai import OpenAI

# Address and key come from OPENAI_BASE_URL and OPENAI_API_KEY.
client = OpenAI()
stream = client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"],
    messages=[{"role": "user", "content": " ".join(sys.argv[1:]) or "Say hello."}],
    max_tokens=int(os.environ.get("MAX_TOKENS", "256")),
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
