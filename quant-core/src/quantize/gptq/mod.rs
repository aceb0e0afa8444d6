//! GPTQ: codes that compensate each other's rounding errors (Frantar et al., ICLR 2023).
//!
//! Rounding to nearest minimizes the error of every weight. What matters is the error of a linear's output, which over
//! the batch is `tr((W − Ŵ) H (W − Ŵ)ᵀ) / 2` with the [`Hessian`] `H = 2/N · Σ x xᵀ`. GPTQ processes columns one after
//! the other, rounds each to its grid, and adjusts the remaining weights of the row such that the output error grows
//! least (eqs. 2 and 3 of the paper):
//!
//! ```text
//! H⁻¹ = Uᵀ U, U upper triangular              `U` is all that GPTQ needs from `H`    [`Factor`]
//! q   = nearest(w_c)                          on the grid of the column's group
//! w_j ← w_j − (w_c − q) · U_cj / U_cc         for every later column j
//! ```
//!
//! For the differences from other implementations, and the reasons, see `docs/gptq.md`.

mod blocks;
#[cfg(test)]
mod blocks_tests;
mod factor;
mod hessian;
mod order;
#[cfg(test)]
mod reference;
mod settings;
mod solve;
#[cfg(test)]
mod tests;

pub use blocks::encode_blocks;
pub use factor::{Factor, FactorError};
pub use hessian::Hessian;
pub use settings::{ActOrder, GptqSettings};
pub use solve::{Solved, solve, solve_within};
