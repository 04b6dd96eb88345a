"""Reading `config.json` so that every key is used, known to be harmless, or refused by name."""

import json
from pathlib import Path
from typing import Any

from ddtree.errors import UserError

# Keys that say how a checkpoint was trained, saved or sampled, or that switch outputs of the library that wrote it.
# None of them can change the logits of a forward pass.
# fmt: off
HARMLESS_KEYS = frozenset({
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures", "attention_dropout",
    "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label", "initializer_range",
    "is_llama_config", "label2id", "language", "length_penalty", "max_length", "min_length", "model_type",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "problem_type", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache",
})
# fmt: on
QUANTISATION_KEYS = ("quantization_config", "compression_config", "quantization")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        UserError: the file cannot be read or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UserError(f"{path} cannot be read as JSON (nested too deeply)", "download the file again") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error})", "download the file again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no JSON object", "download the file again")
    return values


class ConfigFile:
    """One `config.json`, handing out its keys and remembering which were asked for.

    Args:
        folder: the Hugging Face folder.
        what: how messages name the thing, "model" or "drafter".

    Raises:
        UserError: no folder, no `config.json`, or it is not a JSON object.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.what = what
        self.path = folder / "config.json"
        try:
            is_folder, has_config = folder.is_dir(), self.path.is_file()
        except OSError as error:
            raise UserError(
                f"the {what} folder {folder} cannot be read ({error.strerror})",
                "give the path of a Hugging Face folder",
            ) from None
        if not is_folder:
            raise UserError(f"there is no {what} folder {folder}", "give the path of a Hugging Face folder")
        if not has_config:
            raise UserError(
                f"{folder} is not a {what}: it has no config.json", "give the path of a Hugging Face folder"
            )
        self.values = read_json_object(self.path)
        self._used: set[str] = set()

    def refuse(self, cause: str, remedy: str) -> UserError:
        return UserError(f"{self.path}: {cause}", remedy)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of ``key``, or ``default`` where it is absent or null."""
        self._used.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise self.refuse(f"{key} is {value!r}, not {names}", f"correct {key}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1 that must be there unless ``default`` is given."""
        value = self.get(key, int, default)
        if value is None:
            raise self.refuse(f"{key} is missing", f"take a {self.what} folder whose config.json names {key}")
        if value < 1:
            raise self.refuse(f"{key} is {value}", f"{key} must be at least 1")
        return int(value)

    def refuse_quantised(self) -> None:
        """Refuse checkpoints whose weights are packed in a format that is not read here."""
        for key in QUANTISATION_KEYS:
            self._used.add(key)
            value = self.values.get(key)
            if value:
                method = value.get("quant_method", "unknown") if isinstance(value, dict) else value
                raise self.refuse(
                    f"the weights are quantised ({method}), which this engine does not read",
                    "take the unquantised checkpoint, or serve this one with SGLang and the ddtree plugin",
                )

    def close(self) -> tuple[str, ...]:
        """Refuse keys that nobody asked for; give the harmless ones that are there.

        Raises:
            UserError: a key is neither used nor known to be harmless.
        """
        left = set(self.values) - self._used
        unread = sorted(left - HARMLESS_KEYS)
        if unread:
            raise self.refuse(
                f"{', '.join(unread)} would be ignored, though it may change what the {self.what} computes",
                f"remove the key if it has no effect, or use an engine that reads it ({self.what} of another family?)",
            )
        return tuple(sorted(left & HARMLESS_KEYS))
