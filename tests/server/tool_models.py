"""Models whose chat template knows tools: a tiny one, and SmolLM2 with a template that its authors did not give it."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_models import ALPHABET, SPECIAL_TOKENS, make_drafter, make_target

VOCAB = len(SPECIAL_TOKENS) + len(ALPHABET) + 1  # and the line break

TURNS = (
    "{%- if tools %}OPEN system\nYou can call these functions:\n"
    "{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}\n"
    "Write a call as <tool_call>\n{\"name\": NAME, \"arguments\": ARGUMENTS}\n</tool_call>CLOSE\n{%- endif %}\n"
    "{%- for message in messages %}OPEN {{ message.role }}\n{{ message.content }}\n"
    "{%- for call in message.tool_calls or [] %}"
    "<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}\n"
    "</tool_call>{%- endfor %}CLOSE\n{%- endfor %}{%- if add_generation_prompt %}OPEN assistant\n{% endif %}"
)  # fmt: skip


def tiny_tool_folders(folder: Path) -> tuple[Path, Path]:
    """A tiny pair with tools in its template; it can write line breaks."""
    target = make_target(folder / "tiny", "llama", eos_token_id=None, vocab_size=VOCAB, max_position_embeddings=1024)
    file = target / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["Ċ"] = VOCAB - 1
    file.write_text(json.dumps(tokenizer))
    give_template(target, TURNS.replace("OPEN ", "<s>").replace("CLOSE", "</s>"))
    return target, make_drafter(folder / "drafter", target, block_size=6)


def smollm2_with_tools(folder: Path, original: Path) -> Path:
    """SmolLM2's folder again, with another chat template; the weights are linked."""
    folder.mkdir()
    for file in original.iterdir():
        (folder / file.name).symlink_to(file)
    give_template(folder, TURNS.replace("OPEN ", "<|im_start|>").replace("CLOSE", "<|im_end|>"))
    return folder


def give_template(folder: Path, template: str) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": template}
    file.unlink()
    file.write_text(json.dumps(config))
    jinja = folder / "chat_template.jinja"
    jinja.unlink(missing_ok=True)
    jinja.write_text(template)
