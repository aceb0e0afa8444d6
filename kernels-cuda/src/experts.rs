//! The experts of a layer: sorting a routing by expert, the sums over each token's experts, and the launches of a whole
//! layer.
//!
//! The products of all experts are one launch, see [`LinearExpertsPlan`](crate::linear::LinearExpertsPlan). Routings
//! stay on the device: [`RoutePlan`] sorts them there, and [`SumPlan`] adds rows in a fixed order, so results are
//! bit-identical for any number of tokens. [`ExpertsCall`] plans all launches of a layer, from activations and a
//! routing to results.

mod call;
mod route;
mod sum;

pub use call::{ExpertsArguments, ExpertsCall, ExpertsRegions, ExpertsShape, layer_descriptors};
pub use route::{NO_EXPERT, RouteArguments, RoutePlan};
pub use sum::{SumArguments, SumPlan, SumShape};

use crate::registry::Entry;

/// The variants that the tests compile for the architectures.
pub fn variants() -> Vec<Entry> {
    let mut entries = vec![route::entry()];
    entries.extend(sum::entries());
    entries
}
