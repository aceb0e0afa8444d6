//! The in-memory source and sink.

use super::{assert_holds, content, spec};
use crate::Error;
use crate::checkpoint::{Dtype, MemorySink, MemorySource, TensorSink, TensorSource};

#[test]
fn source_checks_lengths_and_names() {
    let mut source = MemorySource::new();
    source.insert_f32("w", Dtype::Bf16, [2, 2], &[1.0, -2.0, 0.5, 3.0]).unwrap();
    assert_eq!(source.read_f32("w").unwrap(), [1.0, -2.0, 0.5, 3.0]);
    assert!(matches!(source.insert("v", Dtype::U8, [3], vec![0; 2]), Err(Error::Usage { .. })));
    let overflow = source.insert("v", Dtype::U8, [usize::MAX, 2], vec![]);
    assert!(matches!(overflow, Err(Error::Usage { .. })));
    assert!(matches!(source.insert("w", Dtype::U8, [0], vec![]), Err(Error::Usage { .. })));
    assert!(matches!(source.insert_f32("i", Dtype::I8, [1], &[0.0]), Err(Error::TensorDtype { .. })));
    assert!(matches!(source.read_range("w", 7, &mut [0; 2]), Err(Error::Internal(_))));
    assert!(matches!(source.read("x"), Err(Error::MissingTensor { .. })));
}

#[test]
fn sink_holds_callers_to_the_contract() {
    let specs = vec![spec("a", Dtype::F32, &[3]), spec("b", Dtype::U8, &[0]), spec("c", Dtype::U8, &[5])];
    let mut sink = MemorySink::new(specs.clone()).unwrap();
    assert!(sink.is_complete("b") && !sink.is_complete("a") && !sink.is_complete("x"));
    assert!(sink.write("x", 0, &[0]).is_err(), "unknown");
    assert!(sink.write("a", 4, &[0]).is_err(), "skips ahead");
    assert!(sink.write("a", 0, &[0; 13]).is_err(), "too long");
    assert!(sink.clone().into_source().is_err(), "incomplete");
    for s in &specs {
        sink.write(&s.name, 0, &content(s)).unwrap();
    }
    assert!(sink.write("a", 0, &[0]).is_err(), "twice");
    sink.commit().unwrap();
    assert_eq!(sink.commits(), 1);
    assert_holds(&sink.into_source().unwrap(), &specs);

    let bad = |specs| assert!(matches!(MemorySink::new(specs), Err(Error::Internal(_))));
    bad(vec![spec("a", Dtype::U8, &[1]), spec("a", Dtype::U8, &[1])]);
    bad(vec![spec("", Dtype::U8, &[1])]);
    bad(vec![spec("__metadata__", Dtype::U8, &[1])]);
    bad(vec![spec("a", Dtype::U8, &[1; 9])]);
    bad(vec![spec("a", Dtype::U8, &[0, usize::MAX, usize::MAX])]);
}
