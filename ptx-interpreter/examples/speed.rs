//! Measures warp instructions per second: an arithmetic loop, a loop over shared memory, and a loop of matrix products.
use std::time::Instant;

use quant_ptx_interpreter::{Launch, Memory, Module, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arithmetic = "mad.lo.s32 %r10, %r10, %r11, %r1;\nxor.b32 %r11, %r10, %r9;\nfma.rn.f32 %f1, %f2, %f3, %f1;\nprmt.b32 %r12, %r10, %r11, 0x5410;\n".repeat(8);
    let shared =
        "ld.shared.u32 %r12, [%r10];\nadd.u32 %r12, %r12, 1;\nst.shared.u32 [%r10], %r12;\n".repeat(8);
    let wide = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r13];\n".repeat(8);
    let floats = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r20, %r21, %r22, %r23}, {%r20, %r21}, {%f1, %f2, %f3, %f4};\n".repeat(8);
    let integers = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r30, %r31, %r32, %r33}, {%r20, %r21, %r22, %r23}, {%r20, %r21}, {%r30, %r31, %r32, %r33};\n".repeat(8);
    let loops = [
        ("arithmetic", arithmetic),
        ("shared", shared),
        ("ldmatrix", wide),
        ("mma f16", floats),
        ("mma s8", integers),
    ];
    for (name, body) in loops {
        let text = format!(
            ".version 9.0 .target sm_80 .address_size 64 .extern .shared .align 16 .b8 tile[];
             .visible .entry k() {{ .reg .pred %p<2>; .reg .b32 %r<40>; .reg .f32 %f<5>;
             mov.u32 %r1, %tid.x; mov.u32 %r9, tile; shl.b32 %r10, %r1, 2; shl.b32 %r13, %r1, 4; st.shared.v4.u32 [%r13], {{%r1, %r1, %r1, %r1}};
             bar.sync 0; mov.u32 %r2, 0; LOOP: {body} add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 2000; @%p1 bra LOOP; ret; }}"
        );
        let text = text.replace("shl.b32 %r10, %r1, 2", "shl.b32 %r10, %r1, 4");
        let module = Module::parse(&text)?;
        let launch = Launch { grid: [1, 1, 1], block: [128, 1, 1], dynamic_shared: 2048, arguments: vec![] };
        let start = Instant::now();
        let report = module.launch("k", &launch, &mut Memory::new(), &Options::default())?;
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{name}: {:.2} million warp instructions per second",
            report.counters.instructions as f64 / seconds / 1e6
        );
    }
    Ok(())
}
