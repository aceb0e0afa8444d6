//! Resolves which pattern of a recipe applies to which module.

use super::{Pattern, Recipe};
use crate::Result;
use crate::scheme::SchemeRequest;

const IGNORE: &str = "ignore";
const OVERRIDE: &str = "override";

/// The modules selected by one pattern of `ignore` or `override`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SelectorMatches {
    /// The name of the setting: `ignore` or `override`.
    pub option: &'static str,
    /// The pattern.
    pub pattern: String,
    /// The result: `float`, or the scheme.
    pub outcome: String,
    /// The selected modules, in model order.
    pub modules: Vec<String>,
}

/// The patterns of a recipe applied to the modules of a model.
///
/// A pattern of `ignore` takes precedence, then the last override that matches. Modules outside the blocks (the head,
/// the embedding) stay float unless an override selects them. An override selects them only if it matches no linear of
/// a block, so `*=w8a16` applies to the blocks only.
pub(super) struct Selection<'r> {
    recipe: &'r Recipe,
    /// Whether each override matches a linear of a block.
    in_blocks: Vec<bool>,
}

impl<'r> Selection<'r> {
    /// `linears` are the linears of the blocks.
    pub(super) fn new(recipe: &'r Recipe, linears: &[&str]) -> Self {
        let any = |pattern: &Pattern| linears.iter().any(|l| pattern.matches(l));
        Self { recipe, in_blocks: recipe.overrides.iter().map(|(p, _)| any(p)).collect() }
    }

    /// The scheme of a linear of a block; `None` if it stays float.
    pub(super) fn in_block(&self, module: &str) -> Option<SchemeRequest> {
        match self.decisive(module, true) {
            None => Some(self.recipe.scheme),
            Some(i) => self.overriding(i),
        }
    }

    /// The scheme of a module outside the blocks, if an override selects it.
    pub(super) fn outside(&self, module: &str) -> Option<SchemeRequest> {
        self.decisive(module, false).and_then(|i| self.overriding(i))
    }

    fn overriding(&self, selector: usize) -> Option<SchemeRequest> {
        selector.checked_sub(self.recipe.ignore.len()).map(|i| self.recipe.overrides[i].1)
    }

    /// The index of the selector that applies to a module: the first matching pattern of `ignore`, else the last
    /// matching override. Overrides are counted after the patterns of `ignore`.
    fn decisive(&self, module: &str, in_block: bool) -> Option<usize> {
        let Recipe { ignore, overrides, .. } = self.recipe;
        let ignored = ignore.iter().position(|p| p.matches(module));
        let overridden = || {
            let indexed = overrides.iter().zip(&self.in_blocks);
            indexed.into_iter().rposition(|((p, _), inside)| *inside == in_block && p.matches(module))
        };
        ignored.or_else(|| overridden().map(|i| i + ignore.len()))
    }

    /// A selector that matches nothing, or only modules that other selectors take, is an error, because it would have
    /// no effect.
    ///
    /// `outside` are the embedding, the head, and the linears of blocks that are never quantized. Unless overridden,
    /// they stay float, but ignoring one by name is not an error.
    pub(super) fn matches(&self, linears: &[&str], outside: &[&str]) -> Result<Vec<SelectorMatches>> {
        let Recipe { ignore, overrides, .. } = self.recipe;
        let ignored = ignore.iter().map(|p| (IGNORE, p, "float".to_owned()));
        let overridden = overrides.iter().map(|(p, s)| (OVERRIDE, p, s.to_string()));
        let mut selectors = Vec::new();
        for (index, (option, pattern, outcome)) in ignored.chain(overridden).enumerate() {
            let matching = |names: &[&str]| -> Vec<String> {
                names.iter().filter(|n| pattern.matches(n)).map(|n| (*n).to_owned()).collect()
            };
            let (mut modules, others) = (matching(linears), matching(outside));
            if modules.is_empty() && others.is_empty() {
                return Err(pattern.matches_nothing(option, &[linears, outside].concat()));
            }
            let in_block = !modules.is_empty();
            if !in_block {
                modules = others;
            }
            let none_of_them_is = |module: &String| self.decisive(module, in_block) != Some(index);
            if modules.iter().all(none_of_them_is) {
                return Err(pattern.has_no_effect(option));
            }
            modules.retain(|module| !none_of_them_is(module));
            selectors.push(SelectorMatches { option, pattern: pattern.text().to_owned(), outcome, modules });
        }
        Ok(selectors)
    }
}
