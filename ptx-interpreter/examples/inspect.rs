//! Parses PTX files, and lists the instructions that the interpreter does not support.
use quant_ptx_interpreter::Module;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for path in std::env::args().skip(1) {
        let module = Module::parse(&std::fs::read_to_string(&path)?).map_err(|e| format!("{path}: {e}"))?;
        for kernel in module.kernels() {
            println!("{path}: {kernel}: unsupported {:?}", module.unsupported(kernel)?);
        }
    }
    Ok(())
}
