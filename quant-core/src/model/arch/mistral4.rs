//! Mistral 4, a text model of `Mistral3ForConditionalGeneration`: DeepSeek-V3's blocks, with softmax routing and
//! queries scaled by position.

use super::deepseek::{EXPERTS, architecture, decoder, groups, with_shared};
use super::experts::routing;
use super::latent::Latent;
use super::llama_variants::position_scale;
use super::parts::Projections;
use super::{Architecture, Family, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::{RopeLayout, RopeRequest};

#[derive(Debug, Clone, Copy)]
pub(super) struct Mistral4;

impl Family for Mistral4 {
    fn name(&self) -> &'static str {
        "mistral4"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Mistral4ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        const PARAMETERS: &str = "rope_parameters";
        const SHARE: &str = "partial_rotary_factor";
        let d = decoder(config, self.name(), 1e-6)?;
        let routing = RoutingRule {
            normalized: d.flag("norm_topk_prob", true)?,
            epsilon: 1e-20,
            scale: d.factor("routed_scaling_factor")?.unwrap_or(1.0) as f32,
            ..routing(config, &EXPERTS)?
        };
        let routing = RoutingRule { groups: groups(config, routing, [1, 1], 2)?, ..routing };
        let experts = with_shared(config, routing, 1)?;
        let dense = config.optional_usize("first_k_dense_replace")?.unwrap_or(0);
        // The key is required: transformers' defaults are the values of one particular release, and all published
        // configurations contain it.
        let Some(parameters) = config.optional_object(PARAMETERS)? else {
            return Err(config.error(PARAMETERS, "is missing"));
        };
        let (latent, shape) = Latent::read(config)?;
        // The rotated fraction of a head also follows from the widths, so the two must agree.
        let share = latent.rotated() as f64 / shape.head_dim as f64;
        if let Some(other) = parameters.optional_f64(SHARE)?.filter(|found| (found - share).abs() > 1e-9) {
            return Err(
                parameters.error(SHARE, format!("is {other}, but the widths of the head imply {share}"))
            );
        }
        let mut inner = parameters.map().clone();
        inner.remove(SHARE);
        let mut outer = config.map().clone();
        outer.insert(PARAMETERS.into(), inner.into());
        let layout = match d.flag("rope_interleave", true)? {
            true => RopeLayout::Interleaved,
            false => RopeLayout::Halves,
        };
        let rope = RopeRequest { layout, ..RopeRequest::new(latent.rotated(), d.defaults.theta) }
            .read(&config.with_map(&outer))?;
        let mut attention = d.attention(Some(rope), [d.flag("attention_bias", false)?; 2]);
        attention.projections = Projections::Latent(latent);
        attention.position_scale = Some(position_scale(config, &parameters)?);
        architecture(&d, &attention, experts, |layer| layer < dense)
    }
}
