//! The commands that are disturbed.

/// What a command writes.
pub(super) enum Output {
    /// A file or directory that has the same bytes in every run.
    Same(&'static str),
    /// A directory whose files appear one by one, each complete and with the same bytes in every run.
    Each(&'static str),
    /// A file that contains times, and a command that succeeds if it is complete.
    Read(&'static str, &'static str),
}

/// A command. `@NAME` is a path of the bench; the watched directory is `@work`.
pub(super) struct Case {
    pub(super) name: &'static str,
    /// What runs before, undisturbed.
    pub(super) before: &'static [&'static str],
    pub(super) command: &'static str,
    /// Completes the command after a fault.
    pub(super) again: &'static str,
    pub(super) outputs: &'static [Output],
    /// Beginnings of the names of files that a killed process may leave for good.
    pub(super) leftovers: &'static [&'static str],
}

/// Temporary files of a killed process next to results.
const TEMPORARY: &[&str] = &[".tmp"];

const AWQ: &str =
    "quantize @model -o @work/out --samples 4 --seq-len 64 --calibration @text --method awq --force";
const AWQ_RESUMED: &str =
    "quantize @model -o @work/out --samples 4 --seq-len 64 --calibration @text --method awq --force --resume";
const INIT: &str = "job init @model --job @work/store --samples 4 --seq-len 64 --calibration @text";
const EVAL: &str =
    "eval @model --text @text --window 64 --windows 96 --json=@work/result.json --journal=@work/journal";
const REPORT: &str =
    "eval @model --text @text --window 64 --windows 8 --json=@work/result.json --report=@work/report.html";
const UPDATE: &str = "gate --update --baseline @work/baseline.json @work/result.json";
const REFERENCE: &str = "eval @model --text @text --window 64 --windows 8 --save-reference @work/reference";

pub(super) const CASES: [Case; 11] = [
    Case {
        name: "quantize",
        before: &[],
        command: "quantize @model -o @work/out --method rtn",
        again: "quantize @model -o @work/out --method rtn --force --resume",
        outputs: &[Output::Same("out")],
        leftovers: &[],
    },
    Case {
        name: "replace",
        before: &["quantize @other -o @work/out --method rtn"],
        command: AWQ,
        again: AWQ_RESUMED,
        outputs: &[Output::Same("out")],
        leftovers: &[],
    },
    Case {
        name: "gguf",
        before: &[],
        command: "quantize @model -o @work/out.gguf --format gguf --scheme q8_0 --pre none",
        again: "quantize @model -o @work/out.gguf --format gguf --scheme q8_0 --pre none --force --resume",
        outputs: &[Output::Same("out.gguf")],
        leftovers: &[],
    },
    Case {
        name: "init",
        before: &[],
        command: INIT,
        again: INIT,
        outputs: &[Output::Same("store/job.json"), Output::Each("store/inputs")],
        leftovers: &[],
    },
    Case {
        name: "run",
        before: &[INIT],
        command: "job run @work/store",
        again: "job run @work/store",
        outputs: &[Output::Each("store/units")],
        leftovers: &[],
    },
    Case {
        name: "merge",
        before: &[INIT, "job run @work/store"],
        command: "merge @work/store -o @work/out",
        again: "merge @work/store -o @work/out --force --resume",
        outputs: &[Output::Same("out"), Output::Each("store/units")],
        leftovers: &[],
    },
    Case {
        name: "eval",
        before: &[],
        command: EVAL,
        again: EVAL,
        outputs: &[Output::Read("result.json", "gate --suggest @work/result.json")],
        leftovers: TEMPORARY,
    },
    Case {
        name: "reference",
        before: &["eval @other --text @text --window 64 --windows 8 --save-reference @work/reference"],
        command: REFERENCE,
        again: REFERENCE,
        outputs: &[Output::Read(
            "reference",
            "eval @other --text @text --window 64 --windows 8 --reference @work/reference",
        )],
        leftovers: &[],
    },
    Case {
        name: "baseline",
        before: &["eval @model --text @text --window 64 --windows 8 --json=@work/result.json"],
        command: UPDATE,
        again: UPDATE,
        outputs: &[Output::Same("baseline.json")],
        leftovers: TEMPORARY,
    },
    Case {
        name: "update",
        before: &[
            "eval @other --text @text --window 64 --windows 8 --json=@work/result.json",
            UPDATE,
            "eval @model --text @text --window 64 --windows 8 --json=@work/result.json",
        ],
        command: UPDATE,
        again: UPDATE,
        outputs: &[Output::Same("baseline.json")],
        leftovers: TEMPORARY,
    },
    Case {
        name: "report",
        before: &[],
        command: REPORT,
        again: REPORT,
        outputs: &[Output::Read("result.json", "gate --suggest @work/result.json")],
        leftovers: TEMPORARY,
    },
];
