//! Every kernel compiles for every architecture: within its registers, without spilling, and to the instructions it is
//! written for. Needs NVRTC and the disassembler, no GPU.
//!
//! All listed variants are compiled for sm_80, and dealt out over the others, whose machine code is made by the same
//! instructions: each takes a quarter of every kernel's. `QUANT_EVERY_VARIANT=1` compiles all for all.

mod support;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::process::Command;

use quant_kernels_cuda::compile::{Architecture, Form, Image, Variant, compile};
use quant_kernels_cuda::registry::{Entry, entries};
use support::{has_nvrtc, is_there};

/// The directory of CUDA's programs; without it they are looked for as programs are.
const PROGRAMS: &str = "QUANT_CUDA_BIN";

/// Set where all variants are compiled for all architectures.
const EVERY: &str = "QUANT_EVERY_VARIANT";

/// What is compiled for an architecture: of every kernel some.
fn dealt(architecture: Architecture) -> Vec<Entry> {
    let turn = Architecture::ALL.iter().position(|a| *a == architecture).unwrap();
    let all = turn == 0 || std::env::var_os(EVERY).is_some_and(|value| !value.is_empty() && value != "0");
    let mut counts: HashMap<&str, usize> = HashMap::new();
    let mut entries = entries();
    entries.retain(|entry| {
        let count = counts.entry(entry.variant.kernel).or_default();
        *count += 1;
        // The first of every kernel for all.
        all || *count == 1 || (*count + turn).is_multiple_of(4)
    });
    entries
}

/// Compiles entries, and collects what `look` says is wrong.
fn check(architecture: Architecture, look: impl Fn(&Entry, &Image) -> Result<(), String>) {
    let entries = dealt(architecture);
    let wrong: Vec<String> = entries
        .iter()
        .filter_map(|entry| {
            let image = match compile(&entry.variant, architecture, Form::Cubin) {
                Ok(image) => image,
                Err(e) => return Some(e.to_string()),
            };
            look(entry, &image).err().map(|why| format!("{} for {architecture}: {why}", entry.variant))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), entries.len(), wrong.join("\n"));
}

/// Registers, stack, spills, warnings.
fn fits(entry: &Entry, image: &Image) -> Result<(), String> {
    let usage = image.usage().ok_or_else(|| format!("no usage in {:?}", image.log))?;
    if usage.spill_stores + usage.spill_loads + usage.stack > 0 || usage.registers > entry.register_ceiling {
        return Err(format!("{usage:?}, {} registers at most", entry.register_ceiling));
    }
    if image.log.contains("warning") { Err(image.log.clone()) } else { Ok(()) }
}

/// The disassembler, where there is one.
fn disassembler() -> Result<PathBuf, String> {
    let program =
        std::env::var_os(PROGRAMS).map_or("nvdisasm".into(), |dir| PathBuf::from(dir).join("nvdisasm"));
    let found = Command::new(&program).arg("--version").output();
    match found {
        Ok(output) if output.status.success() => Ok(program),
        _ => Err(format!("no nvdisasm in {PROGRAMS} or on the path")),
    }
}

/// The names of a machine code's instructions, with all that is behind a point.
fn disassemble(program: &PathBuf, image: &Image) -> Result<Vec<String>, String> {
    let file = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
    std::fs::write(file.path(), &image.bytes).map_err(|e| e.to_string())?;
    let output = Command::new(program).arg("--no-dataflow").arg(file.path()).output();
    let output = output.map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(instructions(&String::from_utf8_lossy(&output.stdout)))
}

/// Lines such as `/*0040*/  @!P0 LDG.E.128 R4, [R2.64] ;`.
fn instructions(text: &str) -> Vec<String> {
    let names = text.lines().filter_map(|line| {
        let code = line.trim_start().strip_prefix("/*")?.split_once("*/")?.1.trim_start();
        let code = if code.starts_with('@') { code.split_once(' ')?.1.trim_start() } else { code };
        code.split([' ', ';']).next().filter(|name| name.starts_with(|c: char| c.is_ascii_uppercase()))
    });
    names.map(str::to_owned).collect()
}

/// All checks of an architecture, one compilation each.
fn check_all(architecture: Architecture) {
    if !has_nvrtc() {
        return;
    }
    let disassembler = disassembler();
    let program = is_there(disassembler.as_ref().map(|_| ()));
    check(architecture, |entry, image| {
        fits(entry, image)?;
        let Ok(disassembler) =
            disassembler.as_ref().map_err(|_| ()).and_then(|d| program.then_some(d).ok_or(()))
        else {
            return Ok(());
        };
        let names = disassemble(disassembler, image)?;
        let lacks = |wanted: &&&str| !names.iter().any(|name| name.starts_with(**wanted));
        match entry.instructions.iter().filter(lacks).collect::<Vec<_>>() {
            missing if missing.is_empty() => Ok(()),
            missing => Err(format!("no {missing:?} among {} instructions", names.len())),
        }
    });
}

#[test]
fn every_kernel_fits_sm_80() {
    check_all(Architecture::Sm80);
}

#[test]
fn every_kernel_fits_sm_86() {
    check_all(Architecture::Sm86);
}

#[test]
fn every_kernel_fits_sm_89() {
    check_all(Architecture::Sm89);
}

#[test]
fn every_kernel_fits_sm_90() {
    check_all(Architecture::Sm90);
}

#[test]
fn every_kernel_fits_sm_120() {
    check_all(Architecture::Sm120);
}

/// Every listed variant is compiled for two architectures or more, every kernel for all, and every scheme's macro with them.
#[test]
fn variants_are_dealt_to_all() {
    let of = |architecture| dealt(architecture).into_iter().map(|e| e.variant).collect::<Vec<_>>();
    let all = of(Architecture::Sm80);
    let others: Vec<_> = Architecture::ALL[1..].iter().map(|&architecture| of(architecture)).collect();
    let kernels = |variants: &[Variant]| variants.iter().map(|v| v.kernel).collect::<HashSet<_>>();
    let macros = |variants: &[Variant]| {
        let of = |v: &Variant| {
            let names = ["ACTIVATION", "CODE_BITS", "SCALE", "SOURCE", "ELEMENT", "KV_BITS", "HEAD_DIM"];
            let defines = v.defines.iter().filter(|(name, _)| names.contains(name));
            defines.map(|define| (v.kernel, define.clone())).collect::<Vec<_>>()
        };
        variants.iter().flat_map(of).collect::<HashSet<_>>()
    };
    for some in &others {
        assert_eq!(kernels(some), kernels(&all));
        let missing: Vec<_> = macros(&all).difference(&macros(some)).cloned().collect();
        let attention = missing.iter().filter(|(kernel, _)| !kernel.starts_with("pack"));
        assert_eq!(attention.count(), 0, "{missing:?}");
    }
    for variant in &all {
        assert!(others.iter().any(|some| some.contains(variant)), "{variant}");
    }
    println!("{} variants, {:?} for the others", all.len(), others.iter().map(Vec::len).collect::<Vec<_>>());
}

/// PTX is made too, the same each time, and says for whom.
#[test]
fn every_kernel_has_ptx() {
    if !has_nvrtc() {
        return;
    }
    // The first variant of each source.
    let mut seen: Vec<&str> = Vec::new();
    for Entry { variant, .. } in entries() {
        if seen.contains(&variant.source.name) {
            continue;
        }
        seen.push(variant.source.name);
        let of = || compile(&variant, Architecture::Sm80, Form::Ptx).unwrap();
        let (image, again) = (of(), of());
        assert_eq!(image.bytes, again.bytes, "{variant}");
        let text = String::from_utf8(image.bytes).unwrap();
        assert!(
            text.contains(".target sm_80") && text.contains(&format!(".entry {}(", variant.kernel)),
            "{text}"
        );
    }
}

#[test]
fn a_kernel_beyond_its_limits_is_refused() {
    let entry = entries().swap_remove(0);
    let log = |registers, spills| {
        format!(
            "ptxas info : 0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\nUsed {registers} registers"
        )
    };
    let look = |registers, spills| fits(&entry, &Image { bytes: Vec::new(), log: log(registers, spills) });
    assert_eq!(look(entry.register_ceiling, 0), Ok(()));
    assert!(look(entry.register_ceiling + 1, 0).is_err());
    assert!(look(16, 4).is_err());
    assert!(fits(&entry, &Image { bytes: Vec::new(), log: String::new() }).is_err());
}

#[test]
fn instructions_are_found_in_a_listing() {
    let text = "        /*0040*/                   LDG.E.128 R4, [R2.64] ;\n\
                        /*0050*/              @!P0 IMMA.16832.S8.S8 R4, R2.ROW, R3.COL, R4 ;\n\
                .L_x_1:\n\t.align 4\n        /*0060*/                   EXIT ;\n";
    assert_eq!(instructions(text), ["LDG.E.128", "IMMA.16832.S8.S8", "EXIT"]);
}
