#!/usr/bin/env python3
"""Make a tiny model (random weights, own tokenizer) that real vLLM can serve:  make_model.py DIRECTORY [--hidden N ...]

Nothing is downloaded: the tokenizer is a byte-level BPE trained on the running Python's standard library. The same
Python and libraries make the same model. Needs torch, transformers and tokenizers, which come with vLLM.

The text is noise, but two things about it are arranged. White space and special tokens are never chosen, so JSON under
a grammar is written out instead of being padded with blanks for ever. The end is preferred to any one token but never
to the best of thousands: free text runs to its limit, and a grammar that allows the end gets it. It works like this:
channel 0 of the embedding is one constant for all tokens and no layer writes to it, so it reaches the output layer as
about OUTPUT_CONSTANT, where column 0 of the weights is a bias for each token.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4_096
MAX_TOKENS = 32_768
SEED = 1
# 8,192 cold tokens take 1.3 s on one CPU core and 0.04 s warm: large enough to tell, small enough for tests.
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INNER = 128, 4, 2, 1, 64, 256
TRAINING_FILES = 120
EMBEDDED_CONSTANT = 0.05
OUTPUT_CONSTANT = 0.67
"""Measured over random tokens: 0.41 to 0.77."""
END_LOGIT = 0.44
"""Other logits spread by 0.22 around 0; the best of all was 0.62 to 0.9."""

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{{ bos_token }}\
{% if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}\
{% for call in message['tool_calls'] or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer(directory: Path) -> Tokenizer:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:TRAINING_FILES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(file) for file in files], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


def never_chosen(tokenizer: Tokenizer) -> list[int]:
    """Ids of special tokens and of those that start with white space or are no whole characters."""
    ids = [tokenizer.token_to_id(token) for token in SPECIAL]
    for token_id in range(len(SPECIAL), tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if not text.isprintable() or text[:1].isspace() or "�" in text:
            ids.append(token_id)
    return ids


def make_weights(directory: Path, tokenizer: Tokenizer, size: argparse.Namespace) -> None:
    ids = {
        f"{name}_token_id": tokenizer.token_to_id(f"<|{token}|>")
        for name, token in (("bos", "bos"), ("eos", "im_end"), ("pad", "pad"))
    }
    config = transformers.LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=HEAD_SIZE,
        intermediate_size=size.inner,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=MAX_TOKENS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        **ids,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = EMBEDDED_CONSTANT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[never_chosen(tokenizer), 0] = -100
        model.lm_head.weight[ids["eos_token_id"]] = 0
        model.lm_head.weight[ids["eos_token_id"], 0] = END_LOGIT / OUTPUT_CONSTANT
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(ids))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model with random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--kv-heads", type=int, default=KV_HEADS)
    parser.add_argument("--inner", type=int, default=INNER)
    size = parser.parse_args()
    size.directory.mkdir(parents=True, exist_ok=True)
    transformers.logging.disable_progress_bar()
    make_weights(size.directory, make_tokenizer(size.directory), size)


if __name__ == "__main__":
    main()
