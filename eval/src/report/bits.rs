//! The map of a model's bit widths.

use std::collections::BTreeMap;

use maud::{Markup, html};

/// The storage of one linear.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearCell {
    /// The block.
    pub block: usize,
    /// The linear's name in the block.
    pub linear: String,
    /// The scheme, or `float`.
    pub scheme: String,
    /// Bits per code, if it is quantized.
    pub bits: Option<u8>,
}

pub(super) fn bit_map(linears: &[LinearCell]) -> Markup {
    let mut names: Vec<&str> = Vec::new();
    let mut cells: BTreeMap<(usize, &str), &LinearCell> = BTreeMap::new();
    let mut schemes: BTreeMap<&str, (usize, Option<u8>)> = BTreeMap::new();
    for cell in linears {
        if !names.contains(&cell.linear.as_str()) {
            names.push(&cell.linear);
        }
        cells.insert((cell.block, &cell.linear), cell);
        schemes.entry(&cell.scheme).or_insert((0, cell.bits)).0 += 1;
    }
    let blocks = linears.iter().map(|c| c.block + 1).max().unwrap_or(0);
    let class = |bits: Option<u8>| bits.map_or("cell float".to_owned(), |b| format!("cell b{b}"));
    html! {
        p.legend {
            @for (scheme, (count, bits)) in &schemes {
                span { span class=(class(*bits).replace("cell", "key")) {} " " (scheme) ", " (count) " linears" }
            }
        }
        div.wide { table.map {
            @for name in names {
                tr {
                    th { (name) }
                    @for block in 0..blocks {
                        td { @if let Some(cell) = cells.get(&(block, name)) {
                            span class=(class(cell.bits)) title=(format!("block {block}, {name}: {}", cell.scheme)) {}
                        } }
                    }
                }
            }
        } }
        p.soft { "Blocks 0 to " (blocks.saturating_sub(1)) " from left to right." }
    }
}
