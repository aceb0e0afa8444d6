//! The writer's guarantees on the target, the job directory, resuming and locking.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{assert_holds, content, snapshot, spec, write_tensors};
use crate::checkpoint::{
    CheckpointWriter, Dtype, Resume, ShardedCheckpoint, TensorSink, TensorSpec, WriteOptions, refuse_overlap,
};
use crate::{CancelToken, Category, Error, Result, Silent};

fn specs() -> Vec<TensorSpec> {
    vec![
        spec("a", Dtype::F32, &[8]),
        spec("b", Dtype::U8, &[5]),
        spec("c", Dtype::I32, &[3, 2]),
        spec("d", Dtype::F16, &[7]),
    ]
}

fn options() -> WriteOptions {
    WriteOptions {
        max_shard_bytes: 40,
        fingerprint: json!({ "plan": "p", "alpha": 0.1 }),
        ..Default::default()
    }
}

fn forced() -> WriteOptions {
    WriteOptions { force: true, ..options() }
}

fn resumed() -> WriteOptions {
    WriteOptions { resume: Resume::Required, ..options() }
}

/// The options of a run that resumes by itself.
fn again() -> WriteOptions {
    WriteOptions { resume: Resume::IfSame, ..options() }
}

fn place() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    (dir, target)
}

fn job(target: &Path) -> PathBuf {
    target.with_file_name("out.job")
}

fn create(target: &Path, options: WriteOptions) -> Result<CheckpointWriter> {
    CheckpointWriter::create(target, specs(), options)
}

fn finish(mut writer: CheckpointWriter) -> Result<crate::checkpoint::Published> {
    write_tensors(&mut writer, &specs())?;
    writer.add_file("config.json", b"{}")?;
    writer.publish()
}

fn usage_message(result: Result<CheckpointWriter>) -> String {
    match result.err() {
        Some(error @ Error::Usage { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn published_is_complete_and_listed() {
    let (dir, target) = place();
    let published = finish(create(&target, options()).unwrap()).unwrap();
    assert!(!published.replaced && published.leftover.is_none());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing but the target is left");
    assert_holds(&ShardedCheckpoint::open(&target).unwrap(), &specs());
    let names: Vec<String> = snapshot(&target).into_iter().map(|(name, _)| name).collect();
    let expected = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "quant_manifest.json",
    ];
    assert_eq!(names, expected);
    let manifest: Value =
        serde_json::from_slice(&fs::read(target.join("quant_manifest.json")).unwrap()).unwrap();
    let files = manifest["files"].as_array().unwrap();
    assert_eq!(files.len(), 4);
    for (listed, file) in files.iter().zip(&published.files) {
        assert_eq!(listed["name"], file.name);
        assert_eq!(listed["bytes"], fs::metadata(target.join(&file.name)).unwrap().len());
        use sha2::Digest;
        let hash = sha2::Sha256::digest(fs::read(target.join(&file.name)).unwrap());
        assert_eq!(listed["sha256"], crate::digest::hex(&hash));
    }
    let index: Value =
        serde_json::from_slice(&fs::read(target.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 32 + 5 + 24 + 14);
    fs::write(dir.path().join("probe"), "").unwrap();
    let mode = |p: PathBuf| fs::metadata(p).unwrap().permissions().mode();
    assert_eq!(mode(target.join("config.json")), mode(dir.path().join("probe")));
    assert_eq!(mode(target.join(expected[1])), mode(dir.path().join("probe")));
}

#[test]
fn single_shard_has_the_plain_name() {
    let (_dir, target) = place();
    finish(create(&target, WriteOptions::default()).unwrap()).unwrap();
    let names: Vec<String> = snapshot(&target).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["config.json", "model.safetensors", "quant_manifest.json"]);
}

#[test]
fn existing_target_needs_force() {
    let (dir, target) = place();
    finish(create(&target, options()).unwrap()).unwrap();
    let before = snapshot(&target);
    assert!(matches!(create(&target, options()), Err(Error::OutputExists { .. })));
    assert!(!job(&target).exists(), "nothing was created");
    let writer = create(&target, forced()).unwrap();
    assert_eq!(snapshot(&target), before, "the old output stays until the new one is complete");
    assert!(finish(writer).unwrap().replaced);
    assert_eq!(snapshot(&target), before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn force_replaces_only_what_was_written_here() {
    let (_dir, target) = place();
    fs::create_dir(&target).unwrap();
    fs::write(target.join("config.json"), "{}").unwrap();
    fs::write(target.join("model.safetensors"), "years of work").unwrap();
    assert!(usage_message(create(&target, forced())).contains("was not written by quant"));
    fs::remove_dir_all(&target).unwrap();
    fs::create_dir(&target).unwrap();
    finish(create(&target, forced()).unwrap()).unwrap();

    fs::write(target.join("notes.txt"), "mine").unwrap();
    assert!(usage_message(create(&target, forced())).contains("contains `notes.txt`, which quant did not"));
    fs::remove_file(target.join("notes.txt")).unwrap();
    let config = fs::read(target.join("config.json")).unwrap();
    fs::write(target.join("config.json"), "{ \"mine\": true }").unwrap();
    assert!(usage_message(create(&target, forced())).contains("`config.json`, which was modified after"));
    fs::write(target.join("config.json"), config).unwrap();
    fs::create_dir(target.join("more")).unwrap();
    assert!(usage_message(create(&target, forced())).contains("contains `more`"));
    fs::remove_dir(target.join("more")).unwrap();
    fs::remove_file(target.join("config.json")).unwrap();
    fs::create_dir(target.join("config.json")).unwrap();
    assert!(usage_message(create(&target, forced())).contains("contains `config.json`"));
    fs::remove_dir(target.join("config.json")).unwrap();
    let manifest = fs::read(target.join("quant_manifest.json")).unwrap();
    fs::write(target.join("quant_manifest.json"), &manifest[..40]).unwrap();
    assert!(usage_message(create(&target, forced())).contains("unreadable quant_manifest.json"));
    fs::write(target.join("quant_manifest.json"), manifest).unwrap();
    finish(create(&target, forced()).unwrap()).unwrap();

    let (_dir, target) = place();
    fs::write(&target, "a file").unwrap();
    assert!(usage_message(create(&target, forced())).contains("not a directory"));

    // A user's own directory with the job's name is not emptied.
    let (_dir, target) = place();
    fs::create_dir(job(&target)).unwrap();
    fs::write(job(&target).join("mine"), "x").unwrap();
    assert!(usage_message(create(&target, options())).contains("`mine`"));
    assert!(job(&target).join("mine").exists());
}

#[test]
fn target_that_appears_meanwhile_is_kept() {
    let (_dir, target) = place();
    let mut writer = create(&target, options()).unwrap();
    write_tensors(&mut writer, &specs()).unwrap();
    fs::create_dir(&target).unwrap();
    fs::write(target.join("x"), "x").unwrap();
    assert!(matches!(writer.publish(), Err(Error::OutputExists { .. })));
    assert!(target.join("x").exists());
}

#[test]
fn link_to_a_directory_is_written_through() {
    let (dir, link) = place();
    let real = dir.path().join("disk/real");
    fs::create_dir_all(&real).unwrap();
    symlink(&real, &link).unwrap();
    finish(create(&link, forced()).unwrap()).unwrap();
    assert!(link.is_symlink() && real.join("config.json").exists());
    let dangling = dir.path().join("dangling");
    symlink("nowhere", &dangling).unwrap();
    assert!(usage_message(create(&dangling, forced())).contains("broken symbolic link"));
}

#[test]
fn parents_are_created() {
    let (dir, _) = place();
    let target = dir.path().join("x/y/out");
    finish(create(&target, options()).unwrap()).unwrap();
    assert!(target.join("config.json").exists());
    assert!(usage_message(create(Path::new("/"), forced())).contains("cannot be"));
}

#[test]
fn sink_contract_holds() {
    let (_dir, target) = place();
    let mut writer = create(&target, options()).unwrap();
    assert!(matches!(writer.write("x", 0, &[0]), Err(Error::Internal(_))));
    assert!(matches!(writer.write("b", 1, &[0]), Err(Error::Internal(_))));
    assert!(matches!(writer.write("b", 0, &[0; 6]), Err(Error::Internal(_))));
    writer.write("b", 0, &[0; 5]).unwrap();
    assert!(writer.is_complete("b"));
    assert!(matches!(writer.write("b", 0, &[0; 5]), Err(Error::Internal(_))));
    for name in
        ["../x", "a/b", "", "x\0", "CONFIG.json", "model-00001-of-00002.safetensors", "quant_manifest.json"]
    {
        let _ = writer.add_file("config.json", b"{}");
        assert!(matches!(writer.add_file(name, b""), Err(Error::Internal(_))), "{name:?}");
    }
    match writer.publish() {
        Err(Error::Internal(message)) => assert!(message.contains("a, c, d"), "{message}"),
        other => panic!("{other:?}"),
    }
    assert!(!target.exists());
}

#[test]
fn second_writer_is_refused_with_the_name_of_the_first() {
    let (_dir, target) = place();
    let first = create(&target, options()).unwrap();
    for options in [options(), resumed()] {
        match create(&target, options) {
            Err(error @ Error::Locked { .. }) => {
                assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
                assert_eq!(error.category(), Category::Environment);
            }
            other => panic!("{:?}", other.err()),
        }
    }
    drop(first);
    finish(create(&target, options()).unwrap()).unwrap();
}

/// A job in which `a` and `b` were committed and `c` was written, but not committed.
fn interrupted(target: &Path) {
    let mut writer = create(target, options()).unwrap();
    write_tensors(&mut writer, &specs()[..2]).unwrap();
    writer.add_file("config.json", b"old").unwrap();
    writer.commit().unwrap();
    write_tensors(&mut writer, &specs()[2..3]).unwrap();
}

#[test]
fn resuming_keeps_what_was_committed() {
    let (_dir, target) = place();
    finish(create(&target, options()).unwrap()).unwrap();
    let expected = snapshot(&target);

    let (_dir, target) = place();
    interrupted(&target);
    assert!(!target.exists());
    let writer = create(&target, resumed()).unwrap();
    let complete = |w: &CheckpointWriter| specs().iter().map(|s| w.is_complete(&s.name)).collect::<Vec<_>>();
    assert_eq!(complete(&writer), [true, true, false, false]);
    assert!(writer.notes()[0].contains("2 of 4"));
    drop(writer);
    // A run that did nothing can be resumed as well, and a tensor that an earlier run completed may be written again.
    let mut writer = create(&target, resumed()).unwrap();
    writer.write("a", 0, &content(&specs()[0])).unwrap();
    finish(writer).unwrap();
    assert_eq!(snapshot(&target), expected);

    let (_dir, target) = place();
    interrupted(&target);
    let writer = create(&target, options()).unwrap();
    assert_eq!(complete(&writer), [false; 4]);
    finish(writer).unwrap();
    assert_eq!(snapshot(&target), expected);

    let (_dir, target) = place();
    finish(create(&target, resumed()).unwrap()).unwrap();
    assert_eq!(snapshot(&target), expected, "resuming without a job starts a new one");
}

#[test]
fn the_same_request_continues_by_itself() {
    let (_dir, target) = place();
    finish(create(&target, options()).unwrap()).unwrap();
    let expected = snapshot(&target);
    assert!(CheckpointWriter::is_finished(&target));

    for options in [again(), WriteOptions { force: true, ..again() }] {
        let (_dir, target) = place();
        interrupted(&target);
        assert!(!CheckpointWriter::is_finished(&target));
        let writer = create(&target, options).unwrap();
        assert!(writer.is_resumed() && writer.is_complete("a") && !writer.is_complete("c"));
        let note = format!(
            "2 of 4 tensors of the output are complete; to start over, remove {}",
            job(&target).display()
        );
        assert!(writer.notes()[0].ends_with(&note), "{:?}", writer.notes());
        finish(writer).unwrap();
        assert_eq!(snapshot(&target), expected);
    }
}

#[test]
fn finished_work_of_another_request_is_discarded_only_with_force() {
    let (_dir, target) = place();
    interrupted(&target);
    let other = |force| WriteOptions { fingerprint: json!({ "plan": "q", "alpha": 0.1 }), force, ..again() };
    let before = fs::read(job(&target).join("journal.jsonl")).unwrap();
    match create(&target, other(false)) {
        Err(error @ Error::Usage { .. }) => {
            let (message, remedy) = (error.to_string(), error.remedy().to_string());
            assert!(message.contains("\n  plan: was p, is q"), "{message}");
            assert!(
                remedy.starts_with("run with the settings of the interrupted run to resume it, or"),
                "{remedy}"
            );
            assert!(remedy.contains("‹force›") && !remedy.contains("‹resume›"), "{remedy}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(fs::read(job(&target).join("journal.jsonl")).unwrap(), before);
    let writer = create(&target, other(true)).unwrap();
    assert!(!writer.is_resumed() && !writer.is_complete("a") && writer.notes().is_empty());
    drop(writer);
    // Nothing has been finished since, so nothing would be lost.
    let writer = create(&target, again()).unwrap();
    assert!(!writer.is_resumed() && writer.notes().is_empty());
    drop(writer);

    // With a damaged record, the request is unknown.
    interrupted(&target);
    fs::write(job(&target).join("job.json"), "{").unwrap();
    assert!(usage_message(create(&target, again())).contains("damaged"));
    assert!(!create(&target, WriteOptions { force: true, ..again() }).unwrap().is_resumed());
}

#[test]
fn a_null_value_removes_a_record() {
    let (_dir, target) = place();
    let mut writer = create(&target, options()).unwrap();
    for key in ["kept", "removed"] {
        writer.remember(key, &json!([key])).unwrap();
    }
    writer.commit().unwrap();
    writer.remember("removed", &Value::Null).unwrap();
    assert_eq!(writer.recall("removed"), None);
    drop(writer);
    // The removal was not committed.
    let mut writer = create(&target, resumed()).unwrap();
    assert_eq!(writer.recall("removed"), Some(json!(["removed"])));
    writer.remember("removed", &Value::Null).unwrap();
    writer.commit().unwrap();
    drop(writer);
    let writer = create(&target, resumed()).unwrap();
    assert_eq!((writer.recall("kept"), writer.recall("removed")), (Some(json!(["kept"])), None));
    drop(writer);

    // A damaged record is not used, even if it is still JSON.
    let journal = job(&target).join("journal.jsonl");
    let text = fs::read_to_string(&journal).unwrap();
    assert!(text.contains(r#"["kept"]"#), "{text}");
    fs::write(&journal, text.replace(r#"["kept"]"#, r#"["kepT"]"#)).unwrap();
    assert_eq!(create(&target, resumed()).unwrap().recall("kept"), None);
}

/// Neither a link nor another kind of file takes the place of staged files or of the journal.
#[test]
fn misplaced_entries_of_a_job_are_damage() {
    for (entry, is_link) in [("out", true), ("out", false), ("journal.jsonl", true), ("journal.jsonl", false)]
    {
        let (dir, target) = place();
        interrupted(&target);
        let (victim, path) = (dir.path().join("victim"), job(&target).join(entry));
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("keep"), "kept").unwrap();
        if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }.unwrap();
        match (is_link, entry) {
            (true, _) => symlink(&victim, &path).unwrap(),
            (false, "out") => fs::write(&path, "").unwrap(),
            (false, _) => fs::create_dir(&path).unwrap(),
        }
        for options in [again(), resumed()] {
            let message = usage_message(create(&target, options));
            assert!(message.contains(entry) && message.contains("damaged"), "{message}");
        }
        let writer = create(&target, WriteOptions { force: true, ..again() }).unwrap();
        finish(writer).unwrap();
        assert!(target.symlink_metadata().unwrap().is_dir());
        assert_eq!(fs::read(victim.join("keep")).unwrap(), b"kept");
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 1, "{entry}");
    }
}

#[test]
fn damage_to_a_job_costs_only_work() {
    let (_dir, target) = place();
    finish(create(&target, options()).unwrap()).unwrap();
    let expected = snapshot(&target);
    type Damage = fn(&Path);
    const SHARD: &str = "out/model-00001-of-00002.safetensors";
    let damages: [(&str, Damage); 7] = [
        ("torn last line", |job| {
            let journal = job.join("journal.jsonl");
            let text = fs::read(&journal).unwrap();
            fs::write(&journal, &text[..text.len() - 9]).unwrap();
        }),
        ("line without end", |job| {
            let journal = job.join("journal.jsonl");
            let text = fs::read(&journal).unwrap();
            fs::write(&journal, &text[..text.len() - 1]).unwrap();
        }),
        ("flipped bit in the journal", |job| {
            let journal = job.join("journal.jsonl");
            let mut text = fs::read(&journal).unwrap();
            text[40] ^= 4;
            fs::write(&journal, text).unwrap();
        }),
        ("noise in the journal", |job| fs::write(job.join("journal.jsonl"), b"\xff\n{}\n[1]\n").unwrap()),
        ("flipped bit in a tensor", |job| {
            let mut bytes = fs::read(job.join(SHARD)).unwrap();
            let last = bytes.len() - 20;
            bytes[last] ^= 1;
            fs::write(job.join(SHARD), bytes).unwrap();
        }),
        ("short shard", |job| fs::write(job.join(SHARD), b"x").unwrap()),
        ("no staged files", |job| fs::remove_dir_all(job.join("out")).unwrap()),
    ];
    for (what, damage) in damages {
        let (_dir, target) = place();
        interrupted(&target);
        damage(&job(&target));
        let writer = create(&target, resumed()).unwrap();
        let kept = specs().iter().filter(|s| writer.is_complete(&s.name)).count();
        assert!(kept < 2, "{what}: {kept} kept");
        finish(writer).unwrap();
        assert_eq!(snapshot(&target), expected, "{what}");
    }
    let (_dir, target) = place();
    interrupted(&target);
    fs::write(job(&target).join("job.json"), "{").unwrap();
    assert!(usage_message(create(&target, resumed())).contains("damaged"));
}

#[test]
fn resuming_with_other_settings_is_refused() {
    let (_dir, target) = place();
    interrupted(&target);
    let other = WriteOptions {
        fingerprint: json!({ "plan": "q", "alpha": 0.1, "seed": 1 }),
        tool_version: "9".into(),
        ..resumed()
    };
    let message = usage_message(create(&target, other));
    let expected = ["\n  plan: was p, is q", "\n  seed: was not set, is 1", "\n  version: was "];
    assert!(expected.iter().all(|e| message.contains(e)), "{message}");
    assert!(!message.contains("alpha") && !message.contains("layout"), "{message}");
    let shape = CheckpointWriter::create(&target, specs()[..3].to_vec(), resumed());
    assert!(
        usage_message(shape)
            .contains("names, types or shapes of tensors, or metadata of the output: have changed")
    );
    assert!(create(&target, resumed()).unwrap().is_complete("a"), "the job is still there");
}

#[test]
fn abandoning_leaves_nothing() {
    let (dir, target) = place();
    interrupted(&target);
    create(&target, resumed()).unwrap().abandon().unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn verification_names_file_and_tensor() {
    let (_dir, target) = place();
    let mut writer = create(&target, options()).unwrap();
    write_tensors(&mut writer, &specs()).unwrap();
    writer.commit().unwrap();
    let shard = job(&target).join("out/model-00002-of-00002.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    match writer.publish() {
        Err(Error::Verification { path, reason }) => {
            assert!(path.ends_with("model-00002-of-00002.safetensors") && reason.contains("`d`"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert!(!target.exists());
    let writer = create(&target, resumed()).unwrap();
    assert!(writer.is_complete("c") && !writer.is_complete("d"));
    assert!(writer.notes()[1].contains("d"));
    finish(writer).unwrap();
}

#[test]
fn cancelled_publication_can_be_resumed() {
    let (_dir, target) = place();
    let mut writer = create(&target, options()).unwrap();
    write_tensors(&mut writer, &specs()).unwrap();
    let cancel = CancelToken::new();
    cancel.cancel();
    assert!(matches!(writer.publish_observed(&Silent, &cancel), Err(Error::Interrupted)));
    assert!(!target.exists());
    let writer = create(&target, resumed()).unwrap();
    assert!(specs().iter().all(|s| writer.is_complete(&s.name)));
    finish(writer).unwrap();
}

#[test]
fn more_than_the_disk_holds_is_refused_first() {
    let (dir, target) = place();
    let huge = vec![spec("a", Dtype::U8, &[1 << 60])];
    match CheckpointWriter::create(&target, huge, options()) {
        Err(Error::DiskFull { needed, free, .. }) => assert!(needed > 1 << 60 && free < needed),
        other => panic!("{:?}", other.err()),
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    assert!(usage_message(CheckpointWriter::create(&target, vec![], options())).contains("no tensors"));
}

#[test]
fn staged_files_take_their_room_at_once() {
    let (_dir, target) = place();
    let writer =
        CheckpointWriter::create(&target, vec![spec("a", Dtype::U8, &[1 << 20])], options()).unwrap();
    let metadata = fs::metadata(writer.job_directory().join("out/model.safetensors")).unwrap();
    assert_eq!(metadata.len(), writer.layout().file_bytes());
    // File systems without preallocation leave a hole.
    assert!(metadata.blocks() == 0 || metadata.blocks() * 512 >= 1 << 20);
}

#[test]
fn a_directory_without_our_lock_is_not_emptied() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    let job = dir.path().join("out.job");
    let create = || {
        CheckpointWriter::create(
            &target,
            vec![TensorSpec::new("t", Dtype::F32, [1])],
            WriteOptions::default(),
        )
    };
    let refused = |phrase: &str| {
        let error = create().map(drop).unwrap_err();
        assert!(matches!(&error, Error::Usage { .. }) && error.to_string().contains(phrase), "{error}");
    };
    fs::create_dir_all(job.join("out")).unwrap();
    fs::write(job.join("journal.jsonl"), "my diary").unwrap();
    refused("but not the lock file of a run");
    fs::write(job.join("lock"), "the key is under the mat").unwrap();
    refused("`lock`, which is not the lock file of a run");
    fs::remove_file(job.join("lock")).unwrap();
    fs::create_dir(job.join("lock")).unwrap();
    refused("`lock`, which is not the lock file of a run");
    assert_eq!(fs::read_to_string(job.join("journal.jsonl")).unwrap(), "my diary");
    // With the lock of a terminated run, the directory counts as a job's directory; so does an empty directory.
    fs::remove_dir(job.join("lock")).unwrap();
    // After a loss of power, its number may be zeros.
    for lock in ["4711\n", "\0\0\0\0\0", ""] {
        fs::create_dir_all(&job).unwrap();
        fs::write(job.join("lock"), lock).unwrap();
        create().unwrap().abandon().unwrap();
    }
    fs::create_dir(&job).unwrap();
    create().unwrap().abandon().unwrap();
    assert!(!job.exists());
}

#[test]
fn output_and_input_do_not_overlap() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir_all(model.join("sub")).unwrap();
    symlink(&model, dir.path().join("alias")).unwrap();
    fs::create_dir(dir.path().join("x.job")).unwrap();
    let refused = |input: &Path, output: PathBuf| match refuse_overlap(input, &output) {
        Err(Error::OutputIsInput { .. }) => {}
        other => panic!("{}: {other:?}", output.display()),
    };
    refused(&model, model.clone());
    refused(&model, model.join("new/out"));
    refused(&model, dir.path().join("alias"));
    refused(&model, dir.path().join("alias/new"));
    refused(&model, model.join("sub/.."));
    refused(&model, dir.path().to_owned());
    refused(&dir.path().join("alias"), model.join("out"));
    refused(&dir.path().join("x.job"), dir.path().join("x"));
    refuse_overlap(&model, &dir.path().join("out")).unwrap();
    refuse_overlap(&model, &dir.path().join("model2")).unwrap();
    refuse_overlap(&model, &dir.path().join("model/../out")).unwrap();
    assert!(matches!(refuse_overlap(&model, &dir.path().join("no/../model")), Err(Error::Usage { .. })));
    assert!(matches!(refuse_overlap(&dir.path().join("no"), &model), Err(Error::Io { .. })));
}
