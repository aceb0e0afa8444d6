//! Every kernel compiles for every architecture within its limits of registers and spilled bytes, and to the intended
//! instructions. Needs NVRTC and the disassembler, but no GPU.
//!
//! Each listed variant is compiled for at least two architectures. `QUANT_EVERY_VARIANT=1` compiles and disassembles
//! all variants for all architectures.

mod support;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::process::Command;

use quant_kernels_cuda::compile::{Form, GpuArchitecture, Image, Variant, compile};
use quant_kernels_cuda::registry::{Entry, entries};
use support::{every_variant, has_nvrtc, is_there};

/// The environment variable that names the directory of CUDA's programs; if unset, they are searched on `PATH`.
const PROGRAMS: &str = "QUANT_CUDA_BIN";

/// Some of every kernel.
fn dealt(architecture: GpuArchitecture) -> Vec<Entry> {
    let turn = GpuArchitecture::ALL.iter().position(|a| *a == architecture).unwrap();
    let all = every_variant();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    let mut entries = entries();
    entries.retain(|entry| {
        let count = counts.entry(entry.variant.kernel).or_default();
        *count += 1;
        // The first variant of every kernel is compiled for all architectures.
        all || *count == 1 || [0, 2].contains(&((*count + turn) % 5))
    });
    entries
}

/// Fails with all messages that `look` returns.
fn check(architecture: GpuArchitecture, look: impl Fn(usize, &Entry, &Image) -> Result<(), String>) {
    let entries = dealt(architecture);
    let wrong: Vec<String> = entries
        .iter()
        .enumerate()
        .filter_map(|(i, entry)| {
            let image = match compile(&entry.variant, architecture, Form::Cubin) {
                Ok(image) => image,
                Err(e) => return Some(e.to_string()),
            };
            look(i, entry, &image).err().map(|why| format!("{} for {architecture}: {why}", entry.variant))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), entries.len(), wrong.join("\n"));
}

fn fits(entry: &Entry, architecture: GpuArchitecture, image: &Image) -> Result<(), String> {
    let usage = image.usage().ok_or_else(|| format!("no usage in {:?}", image.log))?;
    let spills = usage.spill_stores.max(usage.spill_loads).max(usage.stack) > entry.spill_bytes;
    let is_used = entry.only_on.is_none_or(|only| only == architecture);
    if spills && is_used || usage.registers > entry.register_ceiling {
        return Err(format!(
            "{usage:?}; at most {} registers and {} spilled bytes",
            entry.register_ceiling, entry.spill_bytes
        ));
    }
    if image.log.contains("warning") { Err(image.log.clone()) } else { Ok(()) }
}

fn disassembler() -> Result<PathBuf, String> {
    let program =
        std::env::var_os(PROGRAMS).map_or("nvdisasm".into(), |dir| PathBuf::from(dir).join("nvdisasm"));
    let found = Command::new(&program).arg("--version").output();
    match found {
        Ok(output) if output.status.success() => Ok(program),
        _ => Err(format!("no nvdisasm in {PROGRAMS} or on the path")),
    }
}

/// The instruction names of machine code, including all suffixes after a point.
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

fn check_all(architecture: GpuArchitecture) {
    if !has_nvrtc() {
        return;
    }
    let disassembler = disassembler();
    let program = is_there(disassembler.as_ref().map(|_| ()));
    let first: HashMap<&str, usize> =
        dealt(architecture).iter().enumerate().rev().map(|(i, entry)| (entry.variant.kernel, i)).collect();
    check(architecture, |i, entry, image| {
        fits(entry, architecture, image)?;
        if i % 2 == 1 && !every_variant() && first[entry.variant.kernel] != i {
            return Ok(());
        }
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
    check_all(GpuArchitecture::Sm80);
}

#[test]
fn every_kernel_fits_sm_86() {
    check_all(GpuArchitecture::Sm86);
}

#[test]
fn every_kernel_fits_sm_89() {
    check_all(GpuArchitecture::Sm89);
}

#[test]
fn every_kernel_fits_sm_90() {
    check_all(GpuArchitecture::Sm90);
}

#[test]
fn every_kernel_fits_sm_120() {
    check_all(GpuArchitecture::Sm120);
}

#[test]
fn variants_are_distributed_to_all() {
    let all: Vec<Variant> = entries().into_iter().map(|e| e.variant).collect();
    let dealt = GpuArchitecture::ALL.map(|a| dealt(a).into_iter().map(|e| e.variant).collect::<Vec<_>>());
    let choices = |variants: &[Variant]| {
        let names =
            ["ACTIVATION", "CODE_BITS", "GROUP", "SOURCE", "ELEMENT", "THREADS", "KV_BITS", "HEAD_DIM"];
        let of = |v: &Variant| {
            let chosen = v.defines.iter().filter(|(name, _)| names.contains(name)).cloned();
            chosen
                .map(|define| (v.kernel, define))
                .chain([(v.kernel, ("", String::new()))])
                .collect::<Vec<_>>()
        };
        // There are too few packing kernels to cover their options on each architecture.
        let is_chosen =
            |(kernel, (name, _)): &(&str, (&str, String))| !kernel.starts_with("pack") || name.is_empty();
        variants.iter().flat_map(of).filter(is_chosen).collect::<HashSet<_>>()
    };
    for some in &dealt {
        let missing: Vec<_> = choices(&all).difference(&choices(some)).cloned().collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
    for variant in &all {
        assert!(dealt.iter().filter(|some| some.contains(variant)).count() >= 2, "{variant}");
    }
    println!("{} variants, {:?} for each architecture", all.len(), dealt.each_ref().map(Vec::len));
}

#[test]
fn every_kernel_has_ptx() {
    if !has_nvrtc() {
        return;
    }
    let mut seen: Vec<&str> = Vec::new();
    for Entry { variant, .. } in entries() {
        if seen.contains(&variant.source.name) {
            continue;
        }
        seen.push(variant.source.name);
        let of = || compile(&variant, GpuArchitecture::Sm80, Form::Ptx).unwrap();
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
    let mut entry = entries().swap_remove(0);
    let log = |registers, spills| {
        format!(
            "ptxas info : 0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\nUsed {registers} registers"
        )
    };
    let look = |entry: &Entry, registers, spills| {
        fits(entry, GpuArchitecture::Sm80, &Image { bytes: Vec::new(), log: log(registers, spills) })
    };
    assert_eq!(look(&entry, entry.register_ceiling, 0), Ok(()));
    assert!(look(&entry, entry.register_ceiling + 1, 0).is_err());
    assert!(look(&entry, 16, 4).is_err());
    assert!(fits(&entry, GpuArchitecture::Sm80, &Image { bytes: Vec::new(), log: String::new() }).is_err());
    entry.only_on = Some(GpuArchitecture::Sm80);
    assert!(look(&entry, 16, 4).is_err());
    entry.only_on = Some(GpuArchitecture::Sm90);
    assert_eq!(look(&entry, 16, 4), Ok(()));
    assert!(look(&entry, entry.register_ceiling + 1, 0).is_err());
}

#[test]
fn instructions_are_found_in_a_listing() {
    let text = "        /*0040*/                   LDG.E.128 R4, [R2.64] ;\n\
                        /*0050*/              @!P0 IMMA.16832.S8.S8 R4, R2.ROW, R3.COL, R4 ;\n\
                .L_x_1:\n\t.align 4\n        /*0060*/                   EXIT ;\n";
    assert_eq!(instructions(text), ["LDG.E.128", "IMMA.16832.S8.S8", "EXIT"]);
}
