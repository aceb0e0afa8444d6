"""Checks the meaning of absent configuration fields: a part of check.py, which describes the comparisons.

Fields are removed from an explicit configuration, one at a time and then all together. A field is removed only if
transformers' class reads the rest as the same configuration, which means that its value was the class's default. quant
must then describe the same model as before, or refuse the configuration because the field is missing. The explicit
configurations are, for every family and vision-language model, the class's own default, those of make_tiny.py and
make_vision_language.py, and these with one field set to the class's default.

`check.py --only defaults` runs only these.
"""

import copy
import json
import re

import make_tiny
import make_vision_language
from check_families import due
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

# Classes that are checked on every change; they take turns by the day.
PER_DAY = 10
# Names, not settings of the model; and an object that Gemma 4's class derives from other fields.
KEPT = {"architectures", "model_type", "text_config", "vision_config", "per_layer_config"}
MISSING = re.compile(r"`([\w.]+)` is missing")


def configurations():
    """The configurations of all variants by `model_type`: a list of pairs of a class and its fields."""
    found = {}
    for variant in make_tiny.FAMILIES:
        if variant in make_tiny.BUILT_AS_LLAMA:
            continue
        options = make_tiny.family_options(variant)
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        found.setdefault(config.model_type, []).append(config)
    for name in ("qwen2", "qwen3", "mistral", "mixtral", "qwen3-moe", "opt"):
        options = {"vocab_size": make_tiny.VOCABULARY} | make_tiny.VARIANTS[name]
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        found.setdefault(config.model_type, []).append(config)
    for variant in make_vision_language.VARIANTS:
        options = copy.deepcopy(make_vision_language.VARIANTS[variant])
        text = make_vision_language.TEXT | options.pop("text_config")
        config = AutoConfig.for_model(options.pop("model_type"), text_config=text, **options)
        found.setdefault(config.model_type, []).append(config)
    return found


def fields_of(config):
    """All fields, as they would be written to config.json, with the name of the model's class."""
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    name = kind._model_mapping[type(config)].__name__
    fields = json.loads(json.dumps(config.to_dict()))
    return fields | {"architectures": [name]}


def read(kind, fields):
    """The fields as transformers completes them, or None if it rejects them."""
    try:
        complete = json.loads(json.dumps(kind.from_dict(copy.deepcopy(fields)).to_dict()))
    except Exception:  # whatever a class raises for fields that contradict each other
        return None
    complete.pop("architectures", None)
    return complete


def places(fields, is_inside=False):
    """Paths of all fields that can be removed: also those of rope parameters and of the text model."""
    for key, value in fields.items():
        # For text models inside another, the outer field decides whether a head is tied, and a stored head decides over it.
        if key not in KEPT and not (key == "tie_word_embeddings" and is_inside):
            yield (key,)
        if isinstance(value, dict) and (key in ("rope_parameters", "text_config") or key.endswith("_attention")):
            yield from ((key, *rest) for rest in places(value, is_inside=True))


def at(fields, place):
    for key in place[:-1]:
        fields = fields[key]
    return fields


def without(fields, place):
    rest = copy.deepcopy(fields)
    del at(rest, place)[place[-1]]
    return rest


def silent_pairs(kind, explicit):
    """Pairs of an explicit configuration and one with fewer fields, which mean the same to transformers; with the
    removed field, or None where all of them are removed."""
    meaning = read(kind, explicit)
    if meaning is None:
        return
    least = explicit
    for place in places(explicit):
        # A part of an object that was removed already.
        try:
            at(least, place)
        except KeyError:
            continue
        fewer = without(explicit, place)
        if read(kind, fewer) == meaning:
            yield place, explicit, fewer
            fewer = without(least, place) if place[-1] in at(least, place) else least
            if read(kind, fewer) == meaning:
                least = fewer
    yield None, explicit, least


def explicit_configurations(configs):
    """Explicit configurations of one class, without duplicates."""
    kind = type(configs[0])
    default = fields_of(kind())
    yield default
    for config in configs:
        fields = fields_of(config)
        yield fields
        for place in places(fields):
            try:
                value = at(default, place)[place[-1]]
            except (KeyError, TypeError):
                continue
            if at(fields, place)[place[-1]] != value:
                changed = copy.deepcopy(fields)
                at(changed, place)[place[-1]] = value
                yield changed


def as_stored(value):
    """The value as transformers writes it: JSON has no infinity."""
    if isinstance(value, dict):
        return {key: as_stored(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_stored(inner) for inner in value]
    return {"__float__": "Infinity"} if value == float("inf") else value


def defaults(check, configs):
    kind = type(configs[0])
    # Fields for which quant also reads another name.
    aliases = {"num_experts": {"num_experts", "num_local_experts"}, "hidden_size": {"hidden_size", "n_embed"}}
    aliases |= {name: {name} | aliases.get(name, set()) for name in kind.attribute_map.values()}
    for other, name in kind.attribute_map.items():
        aliases.setdefault(name, {name}).add(other)
    pairs, seen = [], set()
    for explicit in explicit_configurations(configs):
        text = json.dumps(explicit, sort_keys=True)
        if text not in seen:
            seen.add(text)
            pairs += silent_pairs(kind, explicit)
    required, different, same = set(), [], 0
    while pairs:
        given, out = check.scratch / "pairs.json", check.scratch / "compared.json"
        given.write_text(json.dumps([[as_stored(explicit), as_stored(silent)] for _, explicit, silent in pairs]))
        check.program("interop-dump", "describe", given, out)
        again = []
        for (place, explicit, silent), compared in zip(pairs, json.loads(out.read_text()), strict=True):
            if compared is None:
                same += 1
                continue
            first, second = compared
            # quant does not support every configuration of a class.
            if first.startswith("error: "):
                continue
            missing = MISSING.search(second)
            if missing is None:
                different.append(f"{'.'.join(place) if place else 'all'}: {first} | {second}")
                continue
            name = tuple(missing[1].split("."))
            names = {name[-1]}.union(*(group for group in aliases.values() if name[-1] in group))
            required.add(missing[1])
            if place is None:
                restored = copy.deepcopy(silent)
                inside = "text_config" in explicit and name[0] != "text_config"
                paths = [(*name[:-1], last) for last in names]
                for path in [*paths, *(("text_config", *path) for path in paths if inside)]:
                    try:
                        value = at(explicit, path)[path[-1]]
                        at(restored, path)[path[-1]] = copy.deepcopy(value)
                    except (KeyError, TypeError):
                        continue
                if restored != silent:
                    again.append((None, explicit, restored))
                else:
                    different.append(f"all: {second}")
            elif not names.intersection(place):
                different.append(f"{'.'.join(place)}: {second}")
        pairs = again
    if different:
        return f"{len(different)} differences: {' ; '.join(different[:6])}", False
    return f"{same} configurations; required: {', '.join(sorted(required)) or 'none'}", same > 0


def run_all(check, only, whole):
    """Checks all classes if `whole` is set or if they were asked for, otherwise those whose turn it is today."""
    if "defaults" not in only and only not in "defaults":
        return
    # Classes warn of fields that contradict each other, as many of these do.
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    classes = configurations()
    names = list(classes) if whole or only else due(list(classes), PER_DAY)
    for name, configs in [(name, classes[name]) for name in names]:
        title = f"defaults {name}"
        if only in title:
            check.step(title, lambda configs=configs: defaults(check, configs))
    logging.set_verbosity(verbosity)
