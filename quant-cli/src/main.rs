//! The program `quant`.

use std::process::ExitCode;

use quant_cli::Caller;
use quant_cli::allocator::{Allocator, return_memory_early};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    ExitCode::from(quant_cli::main(std::env::args_os().collect(), Caller::Executable { return_memory_early }))
}
