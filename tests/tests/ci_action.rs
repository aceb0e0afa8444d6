//! The GitHub action of the documentation: every failure leaves one annotation with its message.

use std::path::{Path, PathBuf};
use std::process::Command;

use quant_tests::files::sha256;
use quant_tests::program::{Run, Running, program, quant};
use quant_tests::{args, demo_model, workspace_root};
use tempfile::TempDir;

/// The directory in which a job runs, with the binary that an earlier run has cached.
struct Job {
    directory: TempDir,
}

impl Job {
    fn new() -> Self {
        let job = Self { directory: tempfile::tempdir().unwrap() };
        std::fs::create_dir(job.at(".quant-action")).unwrap();
        std::os::unix::fs::symlink(program(), job.at(".quant-action/quant")).unwrap();
        job
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs the script of a step as GitHub does.
    fn step(&self, name: &str, inputs: &[(&str, &str)]) -> Run {
        let mut bash = Command::new("bash");
        bash.args(["--noprofile", "--norc", "-eo", "pipefail", "-c", &script(name)]);
        bash.current_dir(self.directory.path()).envs(inputs.iter().copied());
        bash.env("GITHUB_ACTIONS", "true")
            .env("GITHUB_OUTPUT", self.at("output"))
            .env_remove("GITHUB_STEP_SUMMARY");
        Running::start(bash).wait()
    }

    #[track_caller]
    fn assert_fails(&self, name: &str, inputs: &[(&str, &str)], code: i32, annotation: &str) {
        let run = self.step(name, inputs);
        let output = format!("{}{}", run.stdout, run.stderr);
        let annotations: Vec<&str> = output.lines().filter(|line| line.starts_with("::error")).collect();
        assert!(run.code() == Some(code) && annotations.len() == 1, "{run}");
        assert!(annotations[0].contains(annotation), "no `{annotation}` in {run}");
    }
}

/// The script of a step in action.yml.
fn script(step: &str) -> String {
    let text = std::fs::read_to_string(workspace_root().join("docs/ci/action.yml")).unwrap();
    let (_, rest) = text.split_once(&format!("    - name: {step}\n")).expect("a step of this name");
    let (_, rest) = rest.split_once("      run: |\n").expect("a script");
    let lines = rest.lines().take_while(|line| line.is_empty() || line.starts_with("        "));
    lines.map(|line| format!("{}\n", line.strip_prefix("        ").unwrap_or(line))).collect()
}

fn evaluate(model: &Path, result: &Path) {
    let text = ["--text", "builtin-heldout", "--window", "32", "--windows", "1"];
    let mut arguments = args!["eval", model, format!("--json={}", result.display())];
    arguments.extend(text.map(Into::into));
    quant(arguments).succeeded();
}

#[test]
fn every_failure_leaves_an_annotation() {
    let job = Job::new();
    let digest = sha256(&std::fs::read(program()).unwrap());
    let install = |digest: &str| job.step("Install quant", &[("URL", "file:///absent"), ("SHA256", digest)]);
    install(&digest).succeeded();
    let digits = "0".repeat(64);
    let wrong = [("URL", "file:///absent"), ("SHA256", &*digits)];
    job.assert_fails("Install quant", &wrong, 4, "the SHA-256 of the binary of quant is not that of");

    std::fs::create_dir(job.at("empty")).unwrap();
    let empty = [("REFERENCE", "empty"), ("TEXT", "builtin-heldout")];
    job.assert_fails(
        "Hash the reference",
        &empty,
        4,
        "::error::the files of the reference empty cannot be read",
    );

    let measure = |options: &'static str| {
        [
            ("MODEL", "absent"),
            ("REFERENCE", "absent"),
            ("STORED", ".quant-action/reference.bin"),
            ("TEXT", "builtin-heldout"),
            ("WINDOWS", "1"),
            ("OPTIONS", options),
            ("NAME", "measured"),
        ]
    };
    job.assert_fails(
        "Measure",
        &measure(""),
        4,
        "title=quant eval::quant eval ended with exit code 4: error: absent",
    );
    job.assert_fails(
        "Measure",
        &measure("--windw 9"),
        2,
        "ended with exit code 2: error: unexpected argument",
    );

    // One window decides no test.
    let float = job.at("float");
    std::fs::create_dir(&float).unwrap();
    evaluate(&demo_model(), &float.join("measured.json"));
    let rounded = job.at("rounded");
    quant(args!["quantize", demo_model(), "-o", &rounded, "--method", "rtn", "--scheme", "w3a16-g64"])
        .succeeded();
    evaluate(&rounded, &job.at(".quant-action/measured.json"));
    let baseline = job.at("baseline.json");
    quant(args!["gate", float.join("measured.json"), "--baseline", &baseline, "--update"]).succeeded();
    let head = "schema = \"quant-gate-policy/1\"\n";
    let test = "[[non_inferiority]]\nmetric = \"perplexity\"\nagainst = \"baseline\"\nmargin = 0.01\n";
    let cap = "[[cap]]\nmetric = \"perplexity\"\nat_most = 1.0\n";
    let gate = |policy: &'static str, baseline: &'static str| {
        [("NAME", "measured"), ("POLICY", policy), ("BASELINE", baseline), ("UPDATE", "false")]
    };
    for (name, text) in [("open.toml", test), ("failing.toml", cap)] {
        std::fs::write(job.at(name), format!("{head}{text}")).unwrap();
    }
    job.assert_fails(
        "Gate",
        &gate("open.toml", "baseline.json"),
        3,
        "perplexity against baseline%3A inconclusive::",
    );
    job.assert_fails("Gate", &gate("failing.toml", "baseline.json"), 1, "perplexity%3A fail::perplexity is ");
    std::fs::write(job.at("broken.json"), "{}").unwrap();
    let broken = "title=quant gate::quant gate ended with exit code 4: error: broken.json ";
    job.assert_fails("Gate", &gate("open.toml", "broken.json"), 4, broken);

    let missing = [("POLICY", "open.toml"), ("BASELINE", "absent.json"), ("UPDATE", "false")];
    job.assert_fails("Check the policy and the baseline", &missing, 4, "absent.json is missing");
    std::fs::remove_file(job.at(".quant-action/quant")).unwrap();
    let wrong = [("URL", "file:///absent"), ("SHA256", &*digest)];
    job.assert_fails("Install quant", &wrong, 5, "cannot be downloaded from the input `url`");
}
