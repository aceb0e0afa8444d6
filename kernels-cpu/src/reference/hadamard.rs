//! The Hadamard transform, sum by sum.

use crate::Hadamard;

/// Transforms a row in place: within the Sylvester part at distances 1, 2, 4 and so on, where `(a, b)` becomes
/// `(a + b, a − b)`; then factor by factor from the last, each sum in order of columns; then the scale.
///
/// # Panics
/// When the row has the wrong width.
pub fn hadamard(by: &Hadamard, x: &mut [f32]) {
    assert_eq!(x.len(), by.n(), "a row of the wrong width");
    let mut distance = 1;
    while distance < by.sylvester() {
        for i in (0..x.len()).filter(|i| i & distance == 0) {
            (x[i], x[i + distance]) = (x[i] + x[i + distance], x[i] - x[i + distance]);
        }
        distance *= 2;
    }
    let mut stride = by.sylvester();
    for factor in by.parts().iter().rev() {
        let order = factor.order;
        for part in x.chunks_exact_mut(order * stride) {
            let from = part.to_vec();
            for (i, out) in part.iter_mut().enumerate() {
                let signs = &factor.signs[i / stride * order..][..order];
                let column = from[i % stride..].iter().step_by(stride);
                *out = signs.iter().zip(column).fold(0.0, |sum, (sign, x)| sign.mul_add(*x, sum));
            }
        }
        stride *= order;
    }
    x.iter_mut().for_each(|x| *x *= by.scale());
}
