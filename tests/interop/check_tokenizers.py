"""Tokenizers of GGUF files, token by token.

  trained   a small tokenizer of each kind: IDs by Hugging Face's tokenizers, by llama.cpp on quant's GGUF file, and by
            quant on the same file; the name of the pre-tokenizer is the one recognized by its steps
  named     a file with `--pre NAME` for every name that quant can read: IDs by llama.cpp and by quant
  shipped   vocabularies of published models that llama.cpp's sources have: IDs by llama.cpp and by quant, and the name that
            quant recognizes by the hash when it writes the file again
  converted metadata of tokenizers equal to the converter's, also the roles that it gives to GLM's tokens
  refused   tokenizers that cannot be written: a unigram model, an unknown pre-tokenizer

Texts for which llama.cpp's tokens differ from Hugging Face's are excluded, with the reason. check.py runs these as its
`tokens` checks.
"""

import importlib
import json
import re
import subprocess
from unittest import mock

import check_gguf
import make_tokenizers
import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer

# For these, llama.cpp's own expressions differ from those of the published tokenizers in uncased letters and combining
# marks.
APPROXIMATE = {"tekken", "gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie"}
# llama.cpp splits around digits by a function that differs from the published expression: before letters, and in the
# spaces before a number.
GROUPED = {"cohere2moe", "tiny_aya"}
# Names that quant reads. `default` and names of encoders are not among them.
NAMES = """a.x-4.0 bailingmoe bailingmoe2 bloom chatglm-bpe codeshell cohere2moe command-r dbrx deepseek-coder deepseek-llm
    deepseek-r1-qwen deepseek-v3 exaone exaone-moe exaone4 f2llmv2 falcon falcon-h1 falcon3 gigachat glm4 gpt-2 gpt-4o
    gpt3-finnish granite-docling grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2 joyai-llm kanana2 kimi-k2 kormo laguna lfm2
    llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5 minimax-m2 mpt olmo phi-2
    pixtral poro-chat qwen2 qwen35 refact seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder superbpe talkie
    tekken tiny_aya trillion ufakzeka viking youtu""".split()
# Published vocabularies in llama.cpp's sources, and the name that quant finds by the hash of their tokens.
SHIPPED = {"command-r": "command-r", "deepseek-coder": "deepseek-coder", "deepseek-llm": "deepseek-llm", "falcon": "falcon",
           "gemma-4": None, "gpt-2": "gpt-2", "llama-bpe": "llama-bpe", "llama-spm": None, "mpt": "olmo", "phi-3": None,
           # qwen35 has the vocabulary of qwen2, but a different pre-tokenizer.
           "qwen2": "qwen2", "qwen35": "qwen35", "refact": "refact", "starcoder": "starcoder"}
# Run on every change; the others, with up to 256,000 tokens, with --whole.
SMALL = ["gpt-2"]
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
          "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64,
          "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True}


def write_model(out, data, size=None):
    """A random model with this tokenizer, and with more rows in the embedding than tokens."""
    out.mkdir(parents=True, exist_ok=True)
    ids = [*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])]
    size = size or max(ids) + 4
    random = numpy.random.default_rng(5)
    shapes = {"model.embed_tokens": (size, 64), "model.norm": (64,)}
    block = "model.layers.0."
    shapes |= {f"{block}{name}": (64,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"{block}self_attn.{name}_proj": (64, 64) for name in "qkvo"}
    shapes |= {f"{block}mlp.{name}_proj": (64, 64) for name in ("gate", "up", "down")}
    save_file({f"{name}.weight": random.standard_normal(shape).astype("<f4") for name, shape in shapes.items()},
              out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": size}))
    (out / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))
    return out


def write_gguf(check, model, *options):
    out = check.scratch / "tokens.gguf"
    check.program("quant", "quantize", model, "-o", out, "--format", "gguf", "--force", "--quiet", "--scheme", "f16", *options)
    return out


def by_quant(check, file, texts):
    asked, out = check.scratch / "texts.json", check.scratch / "ids.json"
    asked.write_text(json.dumps(texts))
    check.program("interop-dump", "ids", file, asked, out)
    return json.loads(out.read_text())


def by_llama_cpp(check, llama_cpp, file, texts):
    asked = check.scratch / "texts"
    asked.write_bytes(b"".join(text.encode() + b"\0" for text in texts))
    done = subprocess.run([llama_cpp / "bin/token-ids", file, asked], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"token-ids: {done.stderr[-600:]}")
    found = [[int(id) for id in line.split()] for line in done.stdout.split("\n")[:-1]]
    if len(found) != len(texts):
        raise RuntimeError(f"token-ids: {len(found)} lines for {len(texts)} texts")
    return found


def other(texts, ours, theirs):
    """Texts whose tokens differ."""
    return [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b]


def key(llama_cpp, file, name):
    field = check_gguf.reader(llama_cpp).GGUFReader(file).get_field(name)
    return None if field is None else field.contents()


def three_ways(check, llama_cpp, model, known_to_differ, *options):
    """Hugging Face's tokens against quant's and llama.cpp's."""
    file, texts = write_gguf(check, model, *options), make_tokenizers.texts()
    encode = Tokenizer.from_file(str(model / "tokenizer.json")).encode
    expected = [encode(text).ids for text in texts]
    wrong = other(texts, by_quant(check, file, texts), expected)
    if wrong:
        return f"quant: {[text[:40] for text in wrong]}", False
    wrong = other(texts, by_llama_cpp(check, llama_cpp, file, texts), expected)
    unexpected = [text[:40] for text in wrong if not known_to_differ(text)]
    if unexpected:
        return f"llama.cpp: {unexpected}", False
    apart = f", {len(wrong)} texts with other tokens in llama.cpp" if wrong else ""
    return f"{len(texts)} texts, {sum(map(len, expected))} tokens{apart}", True


def trained_bytes(check, llama_cpp, name):
    data = json.loads(make_tokenizers.byte_level(name).to_str())
    model = write_model(check.scratch / f"tokenizer-{name}", data)
    composes = make_tokenizers.BYTE_LEVEL[name][2]
    is_composed = importlib.import_module("unicodedata").is_normalized

    def known_to_differ(text):
        # llama.cpp does not normalize.
        return composes and not is_composed("NFC", text) or name in APPROXIMATE and not text.isascii()

    measured = three_ways(check, llama_cpp, model, known_to_differ)
    found = key(llama_cpp, check.scratch / "tokens.gguf", "tokenizer.ggml.pre")
    wanted = name.removesuffix("-uncomposed")
    return measured if found == wanted or not measured[1] else (f"recognized as {found}", False)


def trained_spaces(check, llama_cpp, kind):
    """BPE with byte fallback: Gemma 4's, and Llama 2's without and with `tokenizer.model`."""
    name = f"tokenizer-{kind}"
    if kind == "gemma4":
        data = make_tokenizers.spaced()
        model = gemma4(check, data)
    elif kind == "merges":
        model = write_model(check.scratch / name, make_tokenizers.spaced(prefix=True))
    else:
        out = check.scratch / name
        out.mkdir()
        make_tokenizers.train_sentencepiece("bpe", out)
        make_tokenizers.from_sentencepiece(out)
        model = write_model(out, json.loads((out / "tokenizer.json").read_text()))
    return three_ways(check, llama_cpp, model, lambda text: False)


def gemma4(check, data):
    """A random Gemma 4 with this tokenizer."""
    import make_tiny
    out = check.scratch / "tokenizer-gemma4"
    if not out.exists():
        size = len(data["model"]["vocab"]) + 4
        with mock.patch.object(make_tiny, "VOCABULARY", size):
            make_tiny.make_model("gemma4-shared-keys", 7).save_pretrained(out)
        (out / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))
        tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
        tokens |= {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": ["<|channel>", "<|turn>"]}
        (out / "tokenizer_config.json").write_text(json.dumps(tokens))
    return out


def named(check, llama_cpp, names):
    """One vocabulary under every name. Tokens differ because expressions do; for some names, llama.cpp's are only
    approximations."""
    data, texts = json.loads(make_tokenizers.byte_level("gpt-2").to_str()), make_tokenizers.texts()
    model, kinds = write_model(check.scratch / "tokenizer-named", data), set()
    for name in names:
        file = write_gguf(check, model, "--pre", name)
        ours, theirs = by_quant(check, file, texts), by_llama_cpp(check, llama_cpp, file, texts)
        wrong = [text for text in other(texts, ours, theirs) if text.isascii() or name not in APPROXIMATE]
        composed = importlib.import_module("unicodedata").is_normalized
        wrong = [text for text in wrong if not (name in GROUPED and re.search(r"\d", text))]
        wrong = [text[:30] for text in wrong if composed("NFC", text) or not name.startswith("qwen")]
        if wrong:
            return f"{name}: {wrong}", False
        kinds.add(json.dumps(ours))
    return f"{len(names)} names, {len(kinds)} different results", len(kinds) > 1 or len(names) == 1


def with_vocabulary(check, llama_cpp, name):
    """A random model with a vocabulary of llama.cpp's sources, written without quant."""
    gguf = check_gguf.reader(llama_cpp)
    fields = gguf.GGUFReader(llama_cpp / f"source/models/ggml-vocab-{name}.gguf").fields
    out = check.scratch / "shipped.gguf"
    writer = gguf.GGUFWriter(out, "llama")
    size = len(fields["tokenizer.ggml.tokens"].data)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    for known, field in fields.items():
        if known.startswith("tokenizer.") and not known.startswith("tokenizer.chat_template"):
            kind = field.types[0]
            writer.add_key_value(known, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    random = numpy.random.default_rng(1).standard_normal
    writer.add_tensor("token_embd.weight", random((size, 32)).astype("<f2"))
    for tensor in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{tensor}.weight", random(32).astype("<f4"))
    writer.add_tensor("output_norm.weight", random(32).astype("<f4"))
    for tensor in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{tensor}.weight", random((32, 32)).astype("<f2"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


# Vocabularies whose published tokenizers normalize texts, which llama.cpp does not.
SHIPPED_APART = {"qwen2": "NFC", "qwen35": "NFC"}


def shipped(check, llama_cpp, name):
    source = with_vocabulary(check, llama_cpp, name)
    listed = (llama_cpp / f"source/models/ggml-vocab-{name}.gguf.inp").read_text()
    texts = make_tokenizers.texts() + listed.split("\n__ggml_vocab_test__\n")
    ours, theirs = by_quant(check, source, texts), by_llama_cpp(check, llama_cpp, source, texts)
    composed = importlib.import_module("unicodedata").is_normalized
    wrong = [text for text in other(texts, ours, theirs) if composed("NFC", text) or name not in SHIPPED_APART]
    if wrong:
        return f"{[text[:40] for text in wrong]}", False
    file = check.scratch / "again.gguf"
    options = [] if name != "gemma-4" else ["--pre", "none"]
    check.program("quant", "quantize", source, "-o", file, "--format", "gguf", "--force", "--quiet", "--scheme", "f16",
                  *options)
    found = key(llama_cpp, file, "tokenizer.ggml.pre")
    if found != SHIPPED[name]:
        return f"recognized as {found}", False
    again = [] if options else other(texts, by_llama_cpp(check, llama_cpp, file, texts), theirs)
    return again or f"{len(texts)} texts, {sum(map(len, ours))} tokens", not again


def converted(check, llama_cpp, kind):
    """Keys of the tokenizer equal to the converter's, which reads the same directory."""
    if kind == "gemma4":
        model = gemma4(check, make_tokenizers.spaced())
    elif kind.startswith("glm4"):
        model = check.model(kind)
    else:
        model = check.scratch / "tokenizer-converted"
        model.mkdir(exist_ok=True)
        make_tokenizers.train_sentencepiece("bpe", model)
        make_tokenizers.from_sentencepiece(model)
        write_model(model, json.loads((model / "tokenizer.json").read_text()))
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True,
                  "add_eos_token": False, "chat_template": "{{ messages }}"}
        # As published: with the added tokens by ID.
        decoder = {str(id): {"content": token, "special": True} for id, token in enumerate(("<unk>", "<s>", "</s>"))}
        tokens["added_tokens_decoder"] = decoder
        (model / "tokenizer_config.json").write_text(json.dumps(tokens))
    file, theirs = write_gguf(check, model), check.scratch / "theirs.gguf"
    importlib.import_module("reference_llama_cpp").convert(llama_cpp, model, "gpt-2", theirs)
    gguf = check_gguf.reader(llama_cpp)

    def keys(path):
        fields = gguf.GGUFReader(path).fields.items()
        return {name: field.contents() for name, field in fields if name.startswith("tokenizer.")}

    ours, theirs = keys(file), keys(theirs)
    if kind == "sentencepiece":
        # llama.cpp ignores this key.
        theirs.pop("tokenizer.ggml.pre")
    wrong = sorted(name for name in ours.keys() | theirs.keys() if not alike(name, ours.get(name), theirs.get(name), kind))
    return wrong or f"{len(ours)} keys", not wrong


def alike(name, ours, theirs, kind):
    if kind == "gemma4" and name.endswith((".tokens", ".scores", ".token_type")):
        # The converter leaves out the rows of the embedding that have no token.
        return ours[:len(theirs)] == theirs and len(ours) >= len(theirs)
    if kind == "sentencepiece" and name.endswith(".token_type"):
        # quant keeps the type of the unknown token; the converter makes it a control token. llama.cpp treats both alike.
        return ours[1:] == theirs[1:] and (ours[0], theirs[0]) == (2, 3)
    if kind == "sentencepiece" and name.endswith(".scores"):
        return ours[1:] == theirs[1:]
    # quant always writes these, the converter only if `tokenizer_config.json` has their keys.
    if name.endswith((".add_space_prefix", ".add_eos_token")) and theirs is None:
        return True
    if name.endswith(".merges") and not ours and theirs is None:
        return True
    # quant leaves out the default.
    return ours == theirs or name.endswith(".add_sep_token") and theirs is False and ours is None


def refused(check):
    out = check.scratch / "tokenizer-unigram"
    out.mkdir()
    make_tokenizers.train_sentencepiece("bpe", out)
    make_tokenizers.from_sentencepiece(out)
    model = write_model(out, json.loads((out / "tokenizer.json").read_text()))
    make_tokenizers.train_sentencepiece("unigram", out)
    arguments = ["quantize", model, "-o", check.scratch / "no.gguf", "--format", "gguf", "--quiet", "--scheme", "f16"]
    check.program("quant", *arguments, status=4)
    (out / "tokenizer.model").unlink()
    check.program("quant", *arguments)
    data = json.loads(make_tokenizers.byte_level("gpt-2").to_str())
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, data["pre_tokenizer"]]}
    model = write_model(check.scratch / "tokenizer-unknown", data)
    arguments[1] = model
    check.program("quant", *arguments, "--force", status=4)
    return "exit code 4", True


def run_all(check, llama_cpp, only, whole):
    if llama_cpp is None or not (llama_cpp / "bin/token-ids").exists():
        print("SKIPPED: llama.cpp's programs are missing: tokens", flush=True)
        return
    llama_cpp = llama_cpp.resolve()
    cases = {f"trained {name}": (lambda name=name: trained_bytes(check, llama_cpp, name)) for name in make_tokenizers.BYTE_LEVEL}
    cases |= {f"trained {kind}": (lambda kind=kind: trained_spaces(check, llama_cpp, kind))
              for kind in ("gemma4", "merges", "sentencepiece")}
    cases |= {f"shipped {name}": (lambda name=name: shipped(check, llama_cpp, name))
              for name in SHIPPED if whole or name in SMALL}
    cases |= {f"converted {kind}": (lambda kind=kind: converted(check, llama_cpp, kind)) for kind in ("gemma4", "sentencepiece", "glm4", "glm4_moe-first")}
    cases["named"] = lambda: named(check, llama_cpp, NAMES if whole else NAMES[::8])
    cases["refused"] = lambda: refused(check)
    for title, work in cases.items():
        if only in f"tokens {title}":
            check.step(f"tokens {title}", work)
