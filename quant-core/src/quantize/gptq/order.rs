//! The order in which columns are rounded.

use super::ActOrder;

impl ActOrder {
    /// The columns in the order in which they are rounded, for a Hessian with this diagonal. Ties keep the columns' own
    /// order.
    pub fn columns(self, diagonal: &[f64], group_size: usize) -> Vec<usize> {
        let heaviest_first = |columns: &mut [usize], weight: &dyn Fn(usize) -> f64| {
            columns.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)));
        };
        let mut columns: Vec<usize> = (0..diagonal.len()).collect();
        match self {
            Self::None => {}
            Self::StaticGroups => heaviest_first(&mut columns, &|c| diagonal[c]),
            Self::GroupAware => {
                for group in columns.chunks_mut(group_size.max(1)) {
                    heaviest_first(group, &|c| diagonal[c]);
                }
                let mut groups: Vec<&[usize]> = columns.chunks(group_size.max(1)).collect();
                groups.sort_by(|a, b| diagonal[b[0]].total_cmp(&diagonal[a[0]]));
                columns = groups.concat();
            }
        }
        columns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let diagonal = [1.0, 5.0, 0.0, 2.0, 9.0, 2.0];
        assert_eq!(ActOrder::None.columns(&diagonal, 2), [0, 1, 2, 3, 4, 5]);
        assert_eq!(ActOrder::StaticGroups.columns(&diagonal, 2), [4, 1, 3, 5, 0, 2]);
        assert_eq!(ActOrder::GroupAware.columns(&diagonal, 2), [4, 5, 1, 0, 3, 2]);
        assert_eq!(ActOrder::GroupAware.columns(&diagonal, 6), ActOrder::StaticGroups.columns(&diagonal, 6));
    }
}
