//! The program `quant`.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: quant_cli::allocator::Allocator = quant_cli::allocator::Allocator;

fn main() -> ExitCode {
    ExitCode::from(quant_cli::main(std::env::args_os().collect(), None))
}
