//! Groups of linears for which engines use one common tensor scale.

use std::collections::HashMap;

use crate::model::Architecture;

#[derive(Debug, Clone, Default)]
pub(super) struct ScaleGroups {
    groups: Vec<Vec<String>>,
    by_module: HashMap<String, usize>,
}

impl ScaleGroups {
    pub(super) fn of(architecture: &Architecture) -> Self {
        let groups = architecture.scale_groups();
        let members =
            groups.iter().enumerate().flat_map(|(i, group)| group.iter().map(move |m| (m.clone(), i)));
        let by_module = members.collect();
        Self { groups, by_module }
    }

    /// `None` if the linear has a scale of its own.
    pub(super) fn with(&self, module: &str) -> Option<&[String]> {
        self.by_module.get(module).map(|&group| &self.groups[group][..])
    }
}
