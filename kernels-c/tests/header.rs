//! The committed headers are what the source says.
//!
//! After a change to the interface, write it anew: `QUANT_WRITE_HEADER=1 cargo test -p quant-kernels-c --test header`.

use std::path::Path;

/// Of the library's own header, and of that of CUDA's kernels.
const SOURCES: [&str; 11] = [
    "checkpoint",
    "experts",
    "features",
    "hadamard",
    "kv",
    "kv_cache",
    "multiply",
    "parallel",
    "rows",
    "status",
    "weights",
];

const CUDA_SOURCES: [&str; 8] = [
    "cuda/region",
    "cuda/kernels",
    "cuda/weights",
    "cuda/pack",
    "cuda/linear",
    "cuda/activation",
    "cuda/append",
    "cuda/attention",
];

const TOP: &str = "/* Kernels that multiply activations with quantized weights: the C interface of the Rust crate
 * quant-kernels-cpu. Written by cbindgen; `cargo test -p quant-kernels-c --test header` compares it.
 *
 * Every function with a qz1_status returns 0 when it is done. A structure begins with its size, which the caller
 * sets; null and misaligned pointers, lengths that are not the shape's, outputs that overlap another part of the call,
 * reserved fields that are not 0 and layouts that are none are refused, and a qz1_message says why. Matrices are
 * row-major; lengths count elements.
 *
 * No function keeps a pointer of the caller beyond the call, starts a thread, or has state beyond its handles; a
 * handle may be used by one thread at a time.
 *
 * Floats are rounded to nearest and subnormal numbers are numbers. Callers that change the rounding mode, or have the
 * processor take subnormals for 0 (FTZ and DAZ, as -ffast-math may at the start of a program), set that back before
 * a call, on the threads of a for_each too: weights whose scale is below 2^-126 would count as 0, and no status tells.
 *
 * Link with -lpthread -ldl -lm.
 */";

const CUDA_TOP: &str = "/* Kernels for NVIDIA GPUs: the C interface of the Rust crate quant-kernels-cuda, in libraries that are built with the
 * feature `cuda`, for which qz1_has(QZ1_FEATURE_CUDA) is 1. Written by cbindgen; `cargo test -p quant-kernels-c --test
 * header` compares it. Not yet run on a device.
 *
 * What quant_kernels.h says of statuses, structures and messages holds here. Neither it nor this needs a header of
 * CUDA's: a stream is a CUstream or cudaStream_t, null for the context's own; an address is a CUdeviceptr or a pointer of
 * CUDA's. The driver and NVRTC are loaded when first asked for.
 *
 * Every family has two functions and two structures:
 *
 *     qz1_cuda_FAMILY_plan(kernels, shape, &plan, message)        compiles and loads what the shape takes
 *     qz1_cuda_plan_workspace(plan, &bytes, &tickets, message)    what the caller allocates
 *     qz1_cuda_FAMILY_launch(plan, arguments, stream, message)    puts it on the stream
 *
 * A plan takes a context that is current on the calling thread, as CUDA's runtime or a framework leaves it; the first of
 * its kind compiles, which takes a tenth of a second and may wait for the device, so plans are made ahead. A launch
 * allocates nothing on the device, waits for nothing, may be captured into a graph, and is refused for a region that is
 * null, misaligned or too short. What is in device memory nobody looks at; that regions overlap nobody sees. What goes
 * wrong on the device is an error of later calls of CUDA's.
 *
 * Matrices are row-major. Contexts outlive handles and plans.
 */";

fn config(top: &str, guard: &str) -> cbindgen::Config {
    cbindgen::Config {
        language: cbindgen::Language::C,
        header: Some(top.to_owned()),
        include_guard: Some(guard.to_owned()),
        cpp_compat: true,
        usize_is_size_t: true,
        documentation_style: cbindgen::DocumentationStyle::C99,
        line_length: 110,
        enumeration: cbindgen::EnumConfig {
            rename_variants: cbindgen::RenameRule::QualifiedScreamingSnakeCase,
            ..Default::default()
        },
        ..Default::default()
    }
}

#[test]
fn the_header_is_current() {
    compare("quant_kernels.h", config(TOP, "QUANT_KERNELS_H"), &SOURCES);
}

#[test]
fn the_header_of_cuda_is_current() {
    let mut config = config(CUDA_TOP, "QUANT_KERNELS_CUDA_H");
    config.includes = vec!["quant_kernels.h".to_owned()];
    config.no_includes = true;
    compare("quant_kernels_cuda.h", config, &CUDA_SOURCES);
}

/// Compares a header with what the source says, or writes it.
fn compare(name: &str, config: cbindgen::Config, sources: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let builder = sources.iter().fold(cbindgen::Builder::new().with_config(config), |builder, name| {
        builder.with_src(root.join(format!("src/{name}.rs")))
    });
    let mut fresh = Vec::new();
    builder.generate().expect("the interface is one of C").write(&mut fresh);
    // What concerns Rust alone.
    let fresh = String::from_utf8(fresh).expect("a header is text").replace("\r\n", "\n");
    let fresh = without_safety(&fresh);
    let path = root.join("include").join(name);
    if std::env::var_os("QUANT_WRITE_HEADER").is_some() {
        std::fs::write(&path, &fresh).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default().replace("\r\n", "\n");
    if committed != fresh {
        let differs = committed.lines().zip(fresh.lines()).position(|(a, b)| a != b);
        panic!("include/{name} is not what the source says, from line {:?} on", differs.map(|l| l + 1));
    }
}

/// Without the sections that Rust asks for: the header's top says what they do.
fn without_safety(header: &str) -> String {
    let mut out = String::new();
    let mut skipping = false;
    for line in header.lines() {
        if line.trim_end() == "// # Safety" {
            skipping = true;
            // The empty line before it.
            if let Some(end) = out.strip_suffix("//\n").map(str::len) {
                out.truncate(end);
            }
        }
        skipping = skipping && line.starts_with("//");
        if !skipping {
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }
    out
}
