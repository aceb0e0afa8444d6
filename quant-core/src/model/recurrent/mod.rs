//! Operations that carry a state from token to token.

mod convolution;
mod delta_net;
mod state_space;

use candle_core::{Device, Tensor};

use super::arch::{Recurrent, RecurrentKind};
use super::tensor_values::{with_slices, with_values};
use super::{OpParameters, Segments};
use crate::{Error, Result};

/// The state of one sequence after its last token.
#[derive(Debug, Clone, Default)]
pub(super) struct State(Vec<f32>);

impl State {
    pub(super) fn zero(len: usize) -> Self {
        Self(vec![0.0; len])
    }

    pub(super) fn bytes(&self) -> usize {
        4 * self.0.capacity()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    /// The first token, counted over the whole batch.
    begin: usize,
    length: usize,
}

impl Run {
    fn all(batch: usize, positions: usize, segments: Segments<'_>) -> Vec<Self> {
        let Some(places) = segments.positions(positions) else {
            return (0..batch).map(|window| Self { begin: window * positions, length: positions }).collect();
        };
        let mut runs: Vec<Self> = Vec::new();
        for (token, place) in places.into_iter().enumerate() {
            match runs.last_mut().filter(|_| place != 0) {
                Some(run) => run.length += 1,
                None => runs.push(Self { begin: token, length: 1 }),
            }
        }
        runs
    }
}

/// Applies a recurrent operation to its inputs `[batch, positions, features]`.
///
/// Without a `state`, every segment begins with a zero state. With a `state`, there must be a single sequence, which
/// starts from this state and replaces it.
pub(super) fn run(
    op: &Recurrent,
    parameters: &OpParameters,
    inputs: &[Tensor],
    segments: Segments<'_>,
    state: Option<&mut State>,
) -> Result<Tensor> {
    let misfit = || {
        let shapes: Vec<_> = inputs.iter().map(Tensor::dims).collect();
        Error::Internal(format!("{op:?} of {shapes:?}"))
    };
    let (batch, positions, width) = inputs.first().ok_or_else(misfit)?.dims3()?;
    let fits = |input: &Tensor, width: usize| input.dims() == [batch, positions, width];
    let single = state.is_none() || (batch == 1 && segments.is_whole());
    let state = state.map(|state| &mut state.0[..]);
    if !single || !segments.fit(batch, positions) || state.as_ref().is_some_and(|s| s.len() != op.state_len())
    {
        return Err(misfit());
    }
    let runs = Run::all(batch, positions, segments);
    let (values, width) = match (&op.kind, inputs, &parameters.0[..]) {
        (RecurrentKind::Convolution(shape), [x], [weight, bias @ ..]) if width == shape.channels => {
            let bias = bias.first().map(Vec::as_slice);
            let work = |x: &[f32]| Ok(convolution::convolve(shape, weight, bias, x, &runs, state));
            (with_values(x, work)?, shape.channels)
        }
        (RecurrentKind::DeltaNet(net), [x, b, a], [a_log, dt_bias])
            if width == net.mixed_width() && [b, a].iter().all(|input| fits(input, net.value_heads())) =>
        {
            let work = |[x, b, a]: [&[f32]; 3]| {
                let gates = delta_net::Gates::new(a_log, dt_bias, b, a);
                Ok(delta_net::apply(net, x, &gates, &runs, state))
            };
            (with_slices([x, b, a], work)?, net.width())
        }
        (RecurrentKind::StateSpace(space), [x, steps], [a_log, d, dt_bias])
            if width == space.mixed_width() && fits(steps, space.heads) =>
        {
            let parameters = state_space::Parameters { a_log, d, dt_bias };
            let work = |[x, steps, _]: [&[f32]; 3]| {
                Ok(state_space::apply(space, &parameters, [x, steps], &runs, state))
            };
            (with_slices([x, steps, steps], work)?, space.width())
        }
        _ => return Err(misfit()),
    };
    Ok(Tensor::from_vec(values, (batch, positions, width), &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_found_in_windows() {
        let run = |begin, length| Run { begin, length };
        assert_eq!(Run::all(2, 3, Segments::whole()), [run(0, 3), run(3, 3)]);
        let starts = [0, 0, 2, 0, 1, 1];
        assert_eq!(Run::all(2, 3, Segments::new(&starts)), [run(0, 2), run(2, 1), run(3, 1), run(4, 2)]);
    }
}
