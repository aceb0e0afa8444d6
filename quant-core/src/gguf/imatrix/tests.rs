//! Importance matrices in files, and their effect on tensors.

use proptest::prelude::*;

use super::*;

fn some() -> Importance {
    let mut importance =
        Importance { chunks: 3, chunk_size: 8, datasets: vec!["a text".into()], ..Default::default() };
    let entry = ImportanceEntry { sums: vec![1.0, 2.0, 4.0, 0.5], counts: vec![2.0] };
    importance.entries.insert("blk.0.attn_q.weight".into(), entry);
    let experts = ImportanceEntry { sums: vec![3.0, 6.0, 0.0, 0.0], counts: vec![3.0, 0.0] };
    importance.entries.insert("blk.0.ffn_up_exps.weight".into(), experts);
    importance
}

#[test]
fn both_kinds_of_files_are_read_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("imatrix.gguf");
    std::fs::write(&path, some().to_gguf().unwrap()).unwrap();
    let back = Importance::read(&path).unwrap();
    assert_eq!(Importance { origin: String::new(), ..back }, some());
    std::fs::write(&path, some().to_dat()).unwrap();
    let back = Importance::read(&path).unwrap();
    assert_eq!((back.chunks, back.datasets), (3, some().datasets));
    assert_eq!(back.entries["blk.0.attn_q.weight"].sums, [1.5, 3.0, 6.0, 0.75]);
    assert_eq!(back.entries["blk.0.ffn_up_exps.weight"].sums, [3.0, 6.0, 3.0, 3.0]);
}

#[test]
fn zeros_alone_and_what_is_not_finite_are_refused() {
    let of = |name: &str, shape: &[usize], sums: &[f32], counts: &[f32]| {
        let mut importance = Importance { origin: "some.imatrix".into(), ..Default::default() };
        let entry = ImportanceEntry { sums: sums.to_vec(), counts: counts.to_vec() };
        importance.entries.insert(name.into(), entry);
        let source = crate::gguf::rows::Source::Values(Vec::new());
        let kind = &crate::blocks::Q4_K;
        importance.of(&PlannedTensor {
            name: name.into(),
            shape: shape.to_vec(),
            kind,
            replaces: None,
            source,
        })
    };
    let found = of("up", &[2, 3, 2], &[4.0, 0.0, 0.0, 0.0], &[2.0, 0.0]).unwrap();
    assert_eq!(found.unwrap(), [2.0, 0.0, 1.0, 1.0]);
    for (shape, sums, counts, expected) in [
        (&[3, 2][..], &[0.0, 0.0][..], &[1.0][..], "has only zeros for matrix 0 of `up`"),
        (&[2, 3, 2], &[4.0, 0.0, 0.0, 0.0], &[2.0, 1.0], "has only zeros for matrix 1 of `up`"),
        (&[3, 2], &[1e30, 1.0], &[1e-30], "has a mean square of inf for matrix 0 of `up`"),
    ] {
        let error = of("up", shape, sums, counts).unwrap_err();
        assert_eq!(error.category(), crate::Category::Input, "{error}");
        assert_eq!(error.to_string(), format!("some.imatrix {expected}"));
    }
}

proptest! {
    #[test]
    fn damaged_files_are_refused_or_read(cut in 0_usize..500, at in 0_usize..500, with: u8, old: bool) {
        let mut bytes = if old { some().to_dat() } else { some().to_gguf().unwrap() };
        let place = at % bytes.len();
        bytes[place] = with;
        bytes.truncate(bytes.len() - cut % bytes.len());
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("imatrix");
        std::fs::write(&path, bytes).unwrap();
        if let Err(error) = Importance::read(&path) {
            let Error::InputFile { remedy, .. } = error else { panic!("{error}") };
            prop_assert!(remedy.marked().contains("importance matrix"), "{remedy}");
        }
    }
}
