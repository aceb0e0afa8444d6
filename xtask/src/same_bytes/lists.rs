//! The lists that cases are made from: checkpoints, recipes, schemes and options.
//!
//! Options are written as on a command line. Words in capitals are abbreviations; see `words` of
//! [`Workspace`](super::cases::Workspace).

use super::models::{MAIN, RAGGED};

/// The checkpoints that the base makes first: name, model and options.
pub const PREPARED: [(&str, &str, &str); 9] = [
    ("w4-g32-asym", MAIN, "--method rtn --scheme w4a16-g32-asym"),
    ("w4-g128-sym", MAIN, "--method awq CAL --format gptq --scheme w4a16-g128-sym"),
    ("w4-awq", MAIN, "--method awq CAL --format awq"),
    ("w2-gptq", MAIN, "--method gptq CAL --format gptq --scheme w2a16-g64"),
    ("w3-biases", "qwen2", "--method rtn --scheme w3a16-g128-asym --format gptq"),
    ("w8-channel", "opt", "--method rtn --scheme w8a16-channel --format compressed-tensors"),
    ("w8a8", MAIN, "--method smoothquant CAL"),
    ("w4a8-two-levels", MAIN, "--method qoq CAL --format qserve"),
    (
        "mixed",
        MAIN,
        "--method rtn --scheme w4a16-g64 --override down_proj=w8a16-g64 --override lm_head=w8a16-g64",
    ),
];

/// Recipes that are applied to every model.
pub const ON_EVERY_MODEL: [(&str, &str); 10] = [
    ("rtn-w4", "--method rtn --scheme w4a16-g32"),
    ("rtn-w8-channel", "--method rtn --scheme w8a16-channel-asym"),
    ("awq", "--method awq --scheme w4a16-g32-asym CAL"),
    ("gptq", "--method gptq --scheme w3a16-g32 CAL"),
    ("awq-gptq", "--method awq-gptq --scheme w4a16-g32 --format gptq CAL"),
    ("smoothquant", "--method smoothquant CAL"),
    ("smoothquant-all", "--method smoothquant --alpha auto --smooth-producers all --scheme w8a8-static CAL"),
    ("qoq", "--method qoq --scheme w4a8kv4-g32-progressive CAL"),
    ("qoq-in-place", "--method qoq --scheme w4a8kv8-channel --skip rotate,reorder CAL"),
    (
        "head",
        "--method rtn --scheme w4a16-g32 --override lm_head=w8a16-channel --override embed_tokens=w8a16-channel",
    ),
];

/// Schemes with quantized activations, quantized caches or progressive scales. Each is run with `rtn`, and with `gptq`
/// in the qserve format.
pub const SCHEMES: [&str; 15] = [
    "w8a8",
    "w8a8-sym",
    "w8a8-channel-asym",
    "w8a8-g64",
    "w4a8-g128",
    "w4a8-g64-asym",
    "w4a8-channel-asym",
    "w4a8-g128-progressive",
    "w4a8-g64-asym-progressive",
    "w4a16-g32-progressive",
    "w4a16kv4-g64",
    "w4a16kv8-g64",
    "w8a8kv8-channel",
    "w4a8kv4-g128-progressive",
    "w4a8kv4-channel",
];

/// Options for the main model, with the names of their cases.
pub const OPTIONS: [(&str, &str); 67] = [
    ("default", "CAL"),
    ("two-threads/awq", "--threads 2 CAL"),
    ("two-threads/gptq", "--method gptq --threads 2 CAL"),
    ("two-threads/qoq", "--method qoq --threads 2 --samples 6 --seq-len 96"),
    ("group-size", "--method rtn --scheme w4a16 --group-size 64"),
    ("group-size-channel", "--method awq --scheme w8a16 --group-size channel CAL"),
    ("asymmetric", "--asymmetric CAL"),
    ("symmetric", "--symmetric --format awq CAL"),
    ("seed", "--seed 7 CAL"),
    ("long-windows", "--samples 9 --seq-len 200"),
    ("one-window", "--samples 1 --seq-len 17"),
    ("packing/documents", "--packing documents CAL"),
    ("packing/stream", "--packing stream TEXT=documents CAL"),
    ("packing/json-documents", "--packing documents TEXT=documents CAL"),
    ("text/plain", "--method gptq TEXT=plain CAL"),
    ("chat/awq", "TEXT=chats --samples 3 --seq-len 96"),
    ("chat/masked-awq", "TEXT=chats --mask prompts --samples 3 --seq-len 96"),
    ("chat/masked-gptq", "--method gptq TEXT=chats --mask prompts --samples 3 --seq-len 96"),
    (
        "chat/masked-smoothquant",
        "--method smoothquant --alpha auto TEXT=chats --mask prompts --samples 3 --seq-len 96",
    ),
    ("chat/masked-qoq", "--method qoq TEXT=chats --mask prompts --samples 3 --seq-len 96"),
    ("chat/masked-stream", "TEXT=chats --mask prompts --packing stream --samples 3 --seq-len 96"),
    ("search/reference", "--search reference CAL"),
    ("search/reference-long", "--search reference --samples 12 --seq-len 150"),
    ("search/reference-awq-gptq", "--method awq-gptq --search reference CAL"),
    ("search/w8a8", "--method awq --scheme w8a8-channel-static CAL"),
    ("search/w4a8", "--method awq --scheme w4a8-g64 CAL"),
    ("gptq/none", "--method gptq --act-order none CAL"),
    ("gptq/static-groups", "--method gptq --act-order static-groups --scheme w4a16-g32 CAL"),
    ("gptq/group-aware", "--method gptq --act-order group-aware --scheme w4a16-g32 CAL"),
    ("gptq/none-channel", "--method gptq --act-order none --scheme w3a16-channel CAL"),
    ("gptq/group-aware-channel", "--method gptq --act-order group-aware --scheme w3a16-channel-asym CAL"),
    ("gptq/float-inputs", "--method gptq --layer-inputs float CAL"),
    ("gptq/float-inputs-static", "--method gptq --scheme w8a8-channel-static --layer-inputs float CAL"),
    ("gptq/quantized-inputs-w4a8", "--method gptq --scheme w4a8-g64 --layer-inputs quantized CAL"),
    ("gptq/damping", "--method gptq --damping 0.1 CAL"),
    ("gptq/small-blocks", "--method gptq --block-size 16 --scheme w2a16-g32 CAL"),
    ("gptq/odd-blocks", "--method gptq --block-size 48 --act-order group-aware --scheme w4a16-g64 CAL"),
    ("gptq/awq-float-inputs", "--method awq-gptq --layer-inputs float --scheme w3a16-g64 CAL"),
    ("smooth/0", "--method smoothquant --alpha 0 CAL"),
    ("smooth/0.5", "--method smoothquant --alpha 0.5 CAL"),
    ("smooth/auto", "--method smoothquant --alpha auto CAL"),
    ("smooth/all", "--method smoothquant --smooth-producers all CAL"),
    ("smooth/static", "--method smoothquant --scheme w8a8-static CAL"),
    ("smooth/static-asym", "--method smoothquant --scheme w8a8-static-asym CAL"),
    ("smooth/static-rtn", "--method rtn --scheme w8a8-channel-static CAL"),
    ("smooth/gptq-static", "--method smoothquant-gptq --scheme w8a8-static-asym CAL"),
    ("smooth/awq", "--method smoothquant-awq --scheme w4a8-g64 CAL"),
    ("smooth/awq-gptq", "--method smoothquant-awq-gptq --scheme w4a8-g32-asym CAL"),
    ("maxima/saved-by-smoothquant", "--method smoothquant MAXIMA CAL"),
    ("maxima/saved-by-awq", "--method awq MAXIMA CAL"),
    ("maxima/used", "--method smoothquant KEPT"),
    ("maxima/used-all", "--method smoothquant --smooth-producers all --alpha 0.6 KEPT"),
    ("maxima/used-static", "--method smoothquant --scheme w8a8-static KEPT"),
    ("maxima/used-then-awq", "--method smoothquant-awq --scheme w4a8-g64 KEPT CAL"),
    ("qoq/output-alpha", "--method qoq --output-alpha 0.5 CAL"),
    ("qoq/output-alpha-auto", "--method qoq --scheme w4a8kv4-channel --output-alpha auto CAL"),
    ("qoq/attention-alpha", "--method qoq --attention-alpha 0.3 CAL"),
    ("qoq/skip-clip", "--method qoq --skip clip,smooth-outputs CAL"),
    ("qoq/quantized-inputs", "--method qoq --layer-inputs quantized CAL"),
    ("select/ignore", "--ignore *.layers.0.* --override down_proj=w8a16-g64 CAL"),
    (
        "select/regex",
        "--method gptq --ignore re:.*\\.(up|gate)_proj --override v_proj=w8a16-channel-asym CAL",
    ),
    ("select/last-wins", "--method rtn --override *.mlp.*=w2a16-g32 --override up_proj=w3a16-g64-asym"),
    ("select/head", "--method awq --override lm_head=w4a16-g64 CAL"),
    (
        "select/head-gptq",
        "--method gptq --override lm_head=w8a16-channel --override embed_tokens=w4a16-g32 CAL",
    ),
    (
        "several/awq",
        "--method awq --scheme w4a16-g64 --format compressed-tensors --format awq --format gptq CAL",
    ),
    ("several/gptq", "--method gptq --scheme w4a16-g64 --format compressed-tensors --format gptq CAL"),
    ("several/qoq", "--method qoq --format qserve --format compressed-tensors CAL"),
];

/// Steps in a custom order, with a scheme that suits them.
pub const STEPS: [(&str, &str); 14] = [
    ("rotate", "w4a16-g32"),
    ("fold-norms", "w4a16-g32"),
    ("clip", "w4a16-g32 CAL"),
    ("reorder", "w4a16-g32 CAL"),
    ("smooth-attention", "w4a16-g32 CAL"),
    ("smooth-outputs", "w4a16-g32 CAL"),
    ("fold-norms,awq", "w4a16-g32 CAL"),
    ("rotate,awq,gptq", "w4a16-g32 CAL"),
    ("reorder,clip,gptq", "w4a16-g32 CAL"),
    ("smooth-attention,awq", "w4a16-g32 CAL"),
    ("smooth-outputs,smooth-attention,clip", "w4a16-g32 CAL"),
    ("smoothquant,reorder,gptq", "w8a8 CAL"),
    ("rotate,reorder,smooth-attention,smooth-outputs,clip", "w4a8kv4-g32 CAL"),
    ("fold-norms,smoothquant,awq,gptq", "w4a8-g32 CAL"),
];

/// Requests that the base refuses; the new program must refuse them with the same exit code.
pub const REFUSED: [(&str, &str, &str); 16] = [
    ("group-does-not-divide", RAGGED, "--method rtn --scheme w4a16-g64"),
    ("group-of-zero", MAIN, "--method rtn --scheme w4a16 --group-size 0"),
    ("pattern-without-match", MAIN, "--method rtn --ignore no_such_proj"),
    ("override-without-match", MAIN, "--method rtn --override no_such_proj=w8a16"),
    ("text-without-use", MAIN, "--method rtn CAL"),
    ("search-without-use", MAIN, "--method gptq --search fast CAL"),
    ("damping-without-use", MAIN, "--method awq --damping 0.1 CAL"),
    ("both-symmetries", MAIN, "--method rtn --symmetric --asymmetric"),
    ("no-scheme", MAIN, "--method rtn --scheme w4a17"),
    ("format-twice", MAIN, "--method rtn --format gptq --format gptq"),
    ("awq-of-3-bits", MAIN, "--method rtn --scheme w3a16-g64 --format awq"),
    ("awq-of-two-schemes", MAIN, "--method rtn --format awq --override down_proj=w4a16-g32"),
    ("qserve-of-one-level", MAIN, "--method rtn --scheme w4a8-g128 --format qserve"),
    ("rotated-opt", "opt", "--method rotate --scheme w4a16-g32"),
    ("windows-beyond-positions", "opt", "--samples 4 --seq-len 600 --scheme w4a16-g32"),
    ("prompts-of-plain-text", MAIN, "--mask prompts TEXT=plain CAL"),
];

/// Recipe files: name and contents. `CAL` stands for the table of a short calibration.
pub const RECIPES: [(&str, &str); 8] = [
    ("awq", "[[transform]]\nkind = \"awq\"\nsearch = \"reference\"\n[quantize]\nscheme = \"w4a16-g64\"\nCAL"),
    (
        "several-formats",
        "format = [\"compressed-tensors\", \"gptq\"]\n[quantize]\nmethod = \"rtn\"\nscheme = \"w8a16-g32\"\n",
    ),
    (
        "smoothquant-awq-gptq",
        "[[transform]]\nkind = \"smoothquant\"\nalpha = \"auto\"\nproducers = \"all\"\n\
         [[transform]]\nkind = \"awq\"\n[quantize]\nmethod = \"gptq\"\nscheme = \"w4a8-g32-sym\"\n\
         [quantize.gptq]\ndamping = 0.05\nblock_size = 32\nact_order = \"group-aware\"\ninputs = \"float\"\nCAL",
    ),
    (
        "qserve",
        "format = \"qserve\"\n[[transform]]\nkind = \"rotate\"\n[[transform]]\nkind = \"reorder\"\n\
         [[transform]]\nkind = \"smooth-attention\"\nalpha = 0.4\n[[transform]]\nkind = \"smooth-outputs\"\nalpha = \"auto\"\n\
         [[transform]]\nkind = \"clip\"\n[quantize]\nmethod = \"gptq\"\nscheme = \"w4a8kv4-g128-progressive\"\nCAL",
    ),
    (
        "select",
        "[quantize]\nmethod = \"gptq\"\nscheme = \"w4a16-g32-asym\"\nignore = [\"*.layers.0.mlp.*\", \"v_proj\"]\n\
         [[quantize.override]]\npattern = \"down_proj\"\nscheme = \"w8a16-channel-sym\"\n\
         [[quantize.override]]\npattern = \"lm_head\"\nscheme = \"w8a16-g64\"\n[quantize.gptq]\nact_order = \"none\"\nCAL",
    ),
    (
        "chats",
        "[[transform]]\nkind = \"fold-norms\"\n[[transform]]\nkind = \"awq\"\n[quantize]\nscheme = \"w4a16-g32\"\n\
         [calibration]\ntext = \"chats.jsonl\"\nsamples = 3\nlength = 96\nmask = \"prompts\"\npacking = \"documents\"\n",
    ),
    ("refused-unknown-key", "[quantize]\nscheme = \"w4a16\"\nsampels = 3\n"),
    ("refused-no-effect", "[[transform]]\nkind = \"awq\"\nalpha = 0.5\n[quantize]\nscheme = \"w4a16\"\nCAL"),
];
pub const RECIPE_CALIBRATION: &str = "[calibration]\nsamples = 4\nlength = 64\n";
