//! Which patterns of a recipe decide over which modules.

use super::{Pattern, Recipe};
use crate::scheme::SchemeRequest;
use crate::{Error, Result};

const IGNORE: &str = "ignore";
const OVERRIDE: &str = "override";

/// Which modules an `--ignore` or `--override` selected.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SelectorMatches {
    /// The option and its value as given, without the pattern's scheme spelled out anew.
    pub option: &'static str,
    /// The pattern.
    pub pattern: String,
    /// What it leads to: `float`, or the scheme.
    pub outcome: String,
    /// The modules it selects, in model order.
    pub modules: Vec<String>,
}

/// The patterns of a recipe held against the modules of a model.
///
/// `--ignore` wins over all, then the last override that matches. What lies outside the blocks (the
/// head, the embedding) stays float unless an override asks for it, and one asks for it only if it
/// selects no linear of a block: `*=w8a16` is about the blocks.
pub(super) struct Selection<'r> {
    recipe: &'r Recipe,
    /// For every override, whether it selects a linear of a block.
    in_blocks: Vec<bool>,
}

impl<'r> Selection<'r> {
    /// `linears` are the linears of the blocks.
    pub(super) fn new(recipe: &'r Recipe, linears: &[&str]) -> Self {
        let any = |pattern: &Pattern| linears.iter().any(|l| pattern.matches(l));
        Self { recipe, in_blocks: recipe.overrides.iter().map(|(p, _)| any(p)).collect() }
    }

    /// The scheme of a linear of a block; `None` where it stays float.
    pub(super) fn in_block(&self, module: &str) -> Option<SchemeRequest> {
        match self.decisive(module, true) {
            None => Some(self.recipe.scheme),
            Some(i) => self.overriding(i),
        }
    }

    /// The scheme of a module outside the blocks, where one was asked for.
    pub(super) fn outside(&self, module: &str) -> Option<SchemeRequest> {
        self.decisive(module, false).and_then(|i| self.overriding(i))
    }

    fn overriding(&self, selector: usize) -> Option<SchemeRequest> {
        selector.checked_sub(self.recipe.ignore.len()).map(|i| self.recipe.overrides[i].1)
    }

    /// Position of the selector that decides over a module, the ignored patterns first.
    fn decisive(&self, module: &str, in_block: bool) -> Option<usize> {
        let Recipe { ignore, overrides, .. } = self.recipe;
        let ignored = ignore.iter().position(|p| p.matches(module));
        let overridden = || {
            let indexed = overrides.iter().zip(&self.in_blocks);
            indexed.into_iter().rposition(|((p, _), inside)| *inside == in_block && p.matches(module))
        };
        ignored.or_else(|| overridden().map(|i| i + ignore.len()))
    }

    /// What each selector decides over. One that matches nothing, or whose every match is taken by
    /// another, asks for something that would not happen.
    ///
    /// `outside` are the modules beside the blocks. They stay float anyway, so ignoring one by name
    /// is asking for what happens.
    pub(super) fn matches(&self, linears: &[&str], outside: &[&str]) -> Result<Vec<SelectorMatches>> {
        let Recipe { ignore, overrides, .. } = self.recipe;
        let ignored = ignore.iter().map(|p| (IGNORE, p, "float".to_owned()));
        let overridden = overrides.iter().map(|(p, s)| (OVERRIDE, p, s.to_string()));
        let mut selectors = Vec::new();
        for (index, (option, pattern, outcome)) in ignored.chain(overridden).enumerate() {
            let matching = |names: &[&str]| -> Vec<String> {
                names.iter().filter(|n| pattern.matches(n)).map(|n| (*n).to_owned()).collect()
            };
            let (mut modules, beside) = (matching(linears), matching(outside));
            if modules.is_empty() && beside.is_empty() {
                return Err(Error::PatternMatchesNothing {
                    option,
                    pattern: pattern.text().to_owned(),
                    nearest: pattern.nearest(&[linears, outside].concat()),
                });
            }
            let in_block = !modules.is_empty();
            if !in_block {
                modules = beside;
            }
            let none_of_them_is = |module: &String| self.decisive(module, in_block) != Some(index);
            if modules.iter().all(none_of_them_is) {
                return Err(Error::usage(
                    format!("‹{option}={pattern}› has no effect: other patterns decide over all it matches"),
                    "remove it; ‹ignore› wins over ‹override›, and a later ‹override› over an earlier one",
                ));
            }
            modules.retain(|module| !none_of_them_is(module));
            selectors.push(SelectorMatches { option, pattern: pattern.text().to_owned(), outcome, modules });
        }
        Ok(selectors)
    }
}
