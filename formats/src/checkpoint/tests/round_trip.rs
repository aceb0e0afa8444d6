//! Written files read back equal, with this crate's reader and with the reference implementation.

use std::collections::BTreeMap;
use std::fs;

use proptest::prelude::*;
use safetensors::SafeTensors;

use super::{assert_holds, content, write_tensors};
use crate::checkpoint::{
    CheckpointWriter, Dtype, OpaqueDtype, ShardLayout, ShardedCheckpoint, TensorSink, TensorSpec,
    WriteOptions,
};

fn specs() -> impl Strategy<Value = Vec<TensorSpec>> {
    let dtype = prop::sample::select(Dtype::ALL.to_vec());
    let tensor = (dtype, prop::collection::vec(0usize..5, 0..4));
    prop::collection::btree_map("[a-z.\"ü]{1,12}", tensor, 1..12).prop_shuffle_values()
}

trait ShuffleValues {
    fn prop_shuffle_values(self) -> BoxedStrategy<Vec<TensorSpec>>;
}

impl<S: Strategy<Value = BTreeMap<String, (Dtype, Vec<usize>)>> + 'static> ShuffleValues for S {
    fn prop_shuffle_values(self) -> BoxedStrategy<Vec<TensorSpec>> {
        self.prop_map(|map| {
            map.into_iter()
                .map(|(name, (dtype, mut shape))| {
                    if dtype.bits() % 8 != 0 {
                        // Elements of less than a byte then fill whole bytes.
                        shape.push(4);
                    }
                    TensorSpec::new(name, dtype, shape)
                })
                .collect::<Vec<_>>()
        })
        .prop_shuffle()
        .boxed()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn written_reads_back(specs in specs(), max_shard_bytes in 1u64..400) {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let options = WriteOptions { max_shard_bytes, ..WriteOptions::default() };
        let mut writer = CheckpointWriter::create(&target, specs.clone(), options).unwrap();
        let backwards: Vec<TensorSpec> = specs.iter().rev().cloned().collect();
        write_tensors(&mut writer, &backwards).unwrap();
        writer.commit().unwrap();
        writer.publish().unwrap();

        assert_holds(&ShardedCheckpoint::open(&target).unwrap(), &specs);
        let layout = ShardLayout::plan(&specs, max_shard_bytes).unwrap();
        let mut seen = 0;
        for (name, bytes) in layout.files() {
            let file = fs::read(target.join(name)).unwrap();
            prop_assert_eq!(file.len() as u64, bytes);
            if !name.ends_with(".safetensors") {
                continue;
            }
            let read = SafeTensors::deserialize(&file).unwrap();
            for (tensor, view) in read.tensors() {
                let spec = specs.iter().find(|s| s.name == tensor).unwrap();
                prop_assert_eq!(view.shape(), spec.info.shape.as_slice());
                let dtype = serde_json::to_value(view.dtype()).unwrap();
                prop_assert_eq!(dtype.as_str(), Some(spec.info.dtype.name()));
                prop_assert_eq!(view.data().to_vec(), content(spec));
                let (shard, _) = layout.position(&tensor).unwrap();
                prop_assert_eq!(&*layout.shards()[shard].name, name);
                seen += 1;
            }
        }
        prop_assert_eq!(seen, specs.len());
    }

    #[test]
    fn layouts_are_aligned_and_within_the_limit(specs in specs(), max_shard_bytes in 1u64..400) {
        let layout = ShardLayout::plan(&specs, max_shard_bytes).unwrap();
        let again = ShardLayout::plan(&specs, max_shard_bytes).unwrap();
        prop_assert_eq!(layout.digest(), again.digest());
        for shard in layout.shards() {
            prop_assert_eq!(shard.header.len() % 8, 0);
            let mut end = shard.header.len() as u64;
            for tensor in &shard.tensors {
                prop_assert_eq!(tensor.offset, end);
                prop_assert_eq!(tensor.offset % tensor.info.dtype.size() as u64, 0);
                end += tensor.info.byte_len();
            }
            prop_assert_eq!(end, shard.bytes);
            let full = shard.tensors.iter().filter(|t| t.info.byte_len() > 0).count();
            prop_assert!(full <= 1 || end - shard.header.len() as u64 <= max_shard_bytes);
        }
    }
}

#[test]
fn unknown_types_are_written_as_they_were_read() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    let opaque = Dtype::Opaque(OpaqueDtype::new("F8_E4M3FNUZ", 7).unwrap());
    let specs = [TensorSpec::new("a", opaque, [7]), TensorSpec::new("b", Dtype::F32, [2])];
    let mut writer = CheckpointWriter::create(&target, specs.to_vec(), WriteOptions::default()).unwrap();
    write_tensors(&mut writer, &specs).unwrap();
    writer.commit().unwrap();
    writer.publish().unwrap();
    let source = ShardedCheckpoint::open(&target).unwrap();
    assert_holds(&source, &specs);
    let file = fs::read(target.join("model.safetensors")).unwrap();
    let read = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(format!("{:?}", read.tensor("a").unwrap().dtype()), "F8_E4M3FNUZ");
    assert!(file.ends_with(&content(&specs[0])), "types of unknown alignment come last");
}
