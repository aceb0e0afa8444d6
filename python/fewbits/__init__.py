"""Quantize large language models on a CPU, and measure the accuracy loss.

>>> import fewbits
>>> fewbits.quantize("MODEL", "OUT", method="rtn")            # doctest: +SKIP
>>> fewbits.evaluate("OUT", text="builtin-heldout", reference="MODEL")  # doctest: +SKIP

Keyword arguments have the names and defaults of the command-line options. Results have attributes and ``to_dict()``;
notebooks display them as a page. Errors are subclasses of :class:`QuantError`.
"""

from fewbits._api import evaluate, gate, inspect, plan, preset_recipe, quantize, suggest_policy, update_baseline
from fewbits._errors import (
    EnvironmentFailure,
    FewbitsWarning,
    InputError,
    InternalError,
    InterruptedRun,
    NumericError,
    QuantError,
    UsageError,
)
from fewbits._events import (
    Event,
    Expected,
    Noted,
    Resumed,
    StageDone,
    StageStarted,
    StepDone,
    StepStarted,
    UnitDone,
    Warned,
)
from fewbits._models import Generated, Model
from fewbits._native import __version__
from fewbits._plans import EngineVerdict, Inspection, LinearInfo, Plan, PlannedFormat, TensorInfo
from fewbits._results import (
    Check,
    Checkpoint,
    Estimate,
    Evaluation,
    Floats,
    GateFailed,
    GateResult,
    Gguf,
    Quantized,
    TensorError,
)

__all__ = [
    "Check",
    "Checkpoint",
    "EngineVerdict",
    "EnvironmentFailure",
    "Estimate",
    "Evaluation",
    "Event",
    "Expected",
    "FewbitsWarning",
    "Floats",
    "GateFailed",
    "GateResult",
    "Generated",
    "Gguf",
    "InputError",
    "Inspection",
    "InternalError",
    "InterruptedRun",
    "LinearInfo",
    "Model",
    "Noted",
    "NumericError",
    "Plan",
    "PlannedFormat",
    "QuantError",
    "Quantized",
    "Resumed",
    "StageDone",
    "StageStarted",
    "StepDone",
    "StepStarted",
    "TensorError",
    "TensorInfo",
    "UnitDone",
    "UsageError",
    "Warned",
    "__version__",
    "evaluate",
    "gate",
    "inspect",
    "plan",
    "preset_recipe",
    "quantize",
    "suggest_policy",
    "update_baseline",
]
