//! The plan: every tensor's fate, settled before any compute.

use std::collections::HashMap;

use super::{Recipe, WeightScheme};
use crate::calibrate::Sampling;
use crate::checkpoint::{Dtype, TensorInfo, TensorSpec};
use crate::error::Indivisible;
use crate::format::{Container, ModuleSchemes};
use crate::model::{Model, NodeId, Op};
use crate::recipe::Method;
use crate::transform::Search;
use crate::{Error, Result};

/// What happens to a tensor of the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Written as it is.
    Copy,
    /// Written float, but rewritten where the method folds scales into it.
    Rewrite {
        /// Its block.
        layer: usize,
        /// Its norm or linear.
        node: NodeId,
    },
    /// Quantized.
    Quantize {
        /// Its block.
        layer: usize,
        /// Its linear.
        node: NodeId,
        /// The linear's name.
        module: String,
        /// The grid.
        scheme: WeightScheme,
        /// The type scales are stored in.
        scale_dtype: Dtype,
    },
}

/// One tensor of the input, what happens to it, and what is written in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanEntry {
    /// Its name in the input.
    pub tensor: String,
    /// The block it belongs to.
    pub layer: Option<usize>,
    /// Its type and shape in the input.
    pub info: TensorInfo,
    /// What happens to it.
    pub action: Action,
    /// What is written.
    pub outputs: Vec<TensorSpec>,
}

impl PlanEntry {
    /// Bytes that are written for it.
    pub fn output_bytes(&self) -> u64 {
        self.outputs.iter().map(|t| t.info.byte_len()).sum()
    }
}

/// Which modules an `--ignore` or `--override` selected.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// What every tensor gets, in the order of writing: tensors before the blocks, the blocks, the rest.
#[derive(Debug, Clone)]
pub struct Plan {
    /// How the numbers are found.
    pub method: &'static Method,
    /// The container.
    pub container: &'static dyn Container,
    /// The calibration batch, for methods that need one.
    pub sampling: Sampling,
    /// How candidates of a search are compared, for methods with one.
    pub search: Search,
    /// All tensors.
    pub entries: Vec<PlanEntry>,
    /// What the patterns of the recipe selected.
    pub selectors: Vec<SelectorMatches>,
    /// Linears that stay float, in model order, the head among them.
    pub float_modules: Vec<String>,
}

impl Plan {
    /// Holds a recipe against a model.
    ///
    /// # Errors
    /// When the model is quantized already, a pattern matches nothing, a group size does not divide
    /// (all offenders are listed), the container cannot express a scheme, or nothing is left to
    /// quantize.
    pub fn new(model: &Model, recipe: &Recipe) -> Result<Self> {
        model.require_float()?;
        let architecture = model.architecture();
        let graph = &architecture.block;
        let modules: Vec<(usize, NodeId, String, [usize; 2])> = (0..architecture.layers)
            .flat_map(|layer| {
                graph.linears().map(move |(node, name, shape, _)| {
                    (layer, node, architecture.in_block(layer, name), shape)
                })
            })
            .collect();
        let names: Vec<&str> = modules.iter().map(|(_, _, name, _)| name.as_str()).collect();
        let selectors = select(recipe, &names, &architecture.head)?;

        let mut offenders = Vec::new();
        let mut entries = Vec::new();
        let mut float_modules = Vec::new();
        let folds = recipe.method.transform.map(|t| t.folded_nodes(graph)).unwrap_or_default();
        for (layer, node, module, [n, k]) in modules {
            let tensor = format!("{module}.weight");
            let info = model.source().require(&tensor)?.clone();
            let (action, outputs) = match scheme_of(recipe, &module) {
                Some(scheme) => {
                    let group_size = scheme.granularity.group_size(k);
                    if k % group_size != 0 {
                        offenders.push(Indivisible { tensor, columns: k, group_size });
                        continue;
                    }
                    let scale_dtype = recipe.container.scale_dtype(info.dtype);
                    let outputs = recipe.container.layout(&module, [n, k], scheme, scale_dtype)?;
                    (Action::Quantize { layer, node, module, scheme, scale_dtype }, outputs)
                }
                None => {
                    float_modules.push(module);
                    let same = vec![TensorSpec { name: tensor.clone(), info: info.clone() }];
                    let action =
                        if folds.contains(&node) { Action::Rewrite { layer, node } } else { Action::Copy };
                    (action, same)
                }
            };
            entries.push(PlanEntry { tensor, layer: Some(layer), info, action, outputs });
        }
        if !offenders.is_empty() {
            return Err(Error::GroupSizeDoesNotDivide(offenders));
        }
        if !entries.iter().any(|e| matches!(e.action, Action::Quantize { .. })) {
            return Err(Error::usage("nothing is left to quantize", "ignore fewer linears"));
        }
        float_modules.push(architecture.head.clone());
        let mut plan = Self {
            method: recipe.method,
            container: recipe.container,
            sampling: recipe.sampling,
            search: recipe.search,
            entries,
            selectors,
            float_modules,
        };
        plan.container.check(&plan.module_schemes())?;
        plan.add_float_tensors(model, &folds)?;
        plan.sort(model);
        plan.check_names(model)?;
        if plan.method.transform.is_some() {
            plan.sampling.check()?;
        }
        Ok(plan)
    }

    /// Fails when two tensors would be written under one name.
    fn check_names(&self, model: &Model) -> Result<()> {
        let mut writers: HashMap<&str, &PlanEntry> = HashMap::new();
        for entry in &self.entries {
            for output in &entry.outputs {
                let Some(other) = writers.insert(&output.name, entry) else { continue };
                let quantized = |e: &PlanEntry| matches!(e.action, Action::Quantize { .. });
                let (copied, module) = if quantized(entry) { (other, entry) } else { (entry, other) };
                return Err(Error::NameTaken {
                    path: model.source().location(&copied.tensor),
                    tensor: output.name.clone(),
                    module: module.tensor.clone(),
                });
            }
        }
        Ok(())
    }

    /// Adds everything that is not a linear's weight: embedding, norms, biases, head, and tensors
    /// we know nothing of.
    fn add_float_tensors(&mut self, model: &Model, folds: &[NodeId]) -> Result<()> {
        let architecture = model.architecture();
        let mut rewritten = std::collections::BTreeMap::new();
        for layer in 0..architecture.layers {
            for (node, op) in architecture.block.nodes().iter().enumerate().map(|(i, n)| (i, &n.op)) {
                let parameter = match op {
                    Op::RmsNorm { name, .. } => format!("{name}.weight"),
                    Op::Linear { name, bias: true, .. } => format!("{name}.bias"),
                    _ => continue,
                };
                if folds.contains(&node) {
                    rewritten.insert(architecture.in_block(layer, &parameter), (layer, node));
                }
            }
        }
        let planned: std::collections::BTreeSet<String> =
            self.entries.iter().map(|e| e.tensor.clone()).collect();
        for name in model.source().names() {
            if planned.contains(name) {
                continue;
            }
            let info = model.source().require(name)?.clone();
            let action = match rewritten.get(name) {
                Some(&(layer, node)) => Action::Rewrite { layer, node },
                None => Action::Copy,
            };
            let outputs = vec![TensorSpec { name: name.to_owned(), info: info.clone() }];
            let layer = architecture.layer_of(name);
            if layer.is_none() && architecture.is_in_some_block(name) {
                return Err(Error::Config {
                    path: model.path().to_owned(),
                    field: "num_hidden_layers".into(),
                    reason: format!("is {}, but the checkpoint holds `{name}`", architecture.layers),
                });
            }
            self.entries.push(PlanEntry { tensor: name.to_owned(), layer, info, action, outputs });
        }
        Ok(())
    }

    /// Blocks in order between what stands before and after them, so that a reader that streams
    /// finds each block in one place.
    fn sort(&mut self, model: &Model) {
        let embedding = model.embedding_name();
        let layers = model.architecture().layers;
        let place = |entry: &PlanEntry| match entry.layer {
            Some(index) => index + 1,
            None if entry.tensor == embedding => 0,
            None => layers + 1,
        };
        self.entries.sort_by(|a, b| (place(a), &a.tensor).cmp(&(place(b), &b.tensor)));
    }

    /// Every tensor that will be written, in order.
    pub fn outputs(&self) -> Vec<TensorSpec> {
        self.entries.iter().flat_map(|e| e.outputs.iter().cloned()).collect()
    }

    /// Bytes of all tensors of the input.
    pub fn input_bytes(&self) -> u64 {
        self.entries.iter().map(|e| e.info.byte_len()).sum()
    }

    /// Bytes of all tensors that will be written.
    pub fn output_bytes(&self) -> u64 {
        self.entries.iter().map(PlanEntry::output_bytes).sum()
    }

    /// Bits that a quantized weight takes on average, scales and zeros included.
    pub fn bits_per_quantized_weight(&self) -> f64 {
        let quantized = || self.entries.iter().filter(|e| matches!(e.action, Action::Quantize { .. }));
        let weights: usize = quantized().map(|e| e.info.elements()).sum();
        let bytes: u64 = quantized().map(PlanEntry::output_bytes).sum();
        bytes as f64 * 8.0 / weights.max(1) as f64
    }

    /// The schemes of all modules, as a container's configuration needs them.
    pub fn module_schemes(&self) -> ModuleSchemes<'_> {
        let quantized = self.entries.iter().filter_map(|e| match &e.action {
            Action::Quantize { module, scheme, .. } => Some((module.as_str(), *scheme)),
            _ => None,
        });
        ModuleSchemes {
            quantized: quantized.collect(),
            float: self.float_modules.iter().map(String::as_str).collect(),
        }
    }

    /// Notes for the user: what readers cannot load, and what else is worth knowing.
    pub fn warnings(&self) -> Vec<String> {
        self.container.warnings(&self.module_schemes())
    }
}

const IGNORE: &str = "--ignore";

/// Position of the selector that decides over a module, the ignored patterns first: `--ignore` wins
/// over all, then the last override that matches.
fn decisive(recipe: &Recipe, module: &str) -> Option<usize> {
    let ignored = recipe.ignore.iter().position(|p| p.matches(module));
    let overridden = || recipe.overrides.iter().rposition(|(p, _)| p.matches(module));
    ignored.or_else(|| overridden().map(|i| i + recipe.ignore.len()))
}

fn scheme_of(recipe: &Recipe, module: &str) -> Option<WeightScheme> {
    match decisive(recipe, module) {
        None => Some(recipe.scheme),
        Some(i) => i.checked_sub(recipe.ignore.len()).map(|i| recipe.overrides[i].1),
    }
}

/// What each selector decides over. One that matches nothing, or whose every match is taken by
/// another, asks for something that would not happen.
///
/// The head stays float anyway, so ignoring it by name is asking for what happens.
fn select(recipe: &Recipe, names: &[&str], head: &str) -> Result<Vec<SelectorMatches>> {
    let ignored = recipe.ignore.iter().map(|p| (IGNORE, p, "float".to_owned()));
    let overridden = recipe.overrides.iter().map(|(p, s)| ("--override", p, s.to_string()));
    let mut selectors = Vec::new();
    for (index, (option, pattern, outcome)) in ignored.chain(overridden).enumerate() {
        let matched: Vec<&str> = names.iter().copied().filter(|n| pattern.matches(n)).collect();
        if matched.is_empty() && option == IGNORE && pattern.matches(head) {
            let (pattern, modules) = (pattern.text().to_owned(), vec![head.to_owned()]);
            selectors.push(SelectorMatches { option, pattern, outcome, modules });
            continue;
        }
        if matched.is_empty() && pattern.matches(head) {
            return Err(Error::usage(
                format!("{option} {pattern} has no effect: the head `{head}` always stays float"),
                "leave it out",
            ));
        }
        if matched.is_empty() {
            return Err(Error::PatternMatchesNothing {
                option,
                pattern: pattern.text().to_owned(),
                nearest: pattern.nearest(names),
            });
        }
        let modules: Vec<String> =
            matched.into_iter().filter(|n| decisive(recipe, n) == Some(index)).map(str::to_owned).collect();
        if modules.is_empty() {
            return Err(Error::usage(
                format!("{option} {pattern} has no effect: other patterns decide over all it matches"),
                "remove it; --ignore wins over --override, and a later --override over an earlier one",
            ));
        }
        selectors.push(SelectorMatches { option, pattern: pattern.text().to_owned(), outcome, modules });
    }
    Ok(selectors)
}
