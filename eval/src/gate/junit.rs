//! An outcome as JUnit XML, which CI systems display as tests: one suite per result, one case per check.

use quant_formats::{Error, Result};
use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use super::changes::with_causes;
use super::{Outcome, Verdict};

/// Returns the XML. A failed check is a failure. An inconclusive one is a failure of type `inconclusive`, or is skipped
/// if the gate as a whole passes.
///
/// # Errors
/// [`Error::Internal`] if the XML cannot be written.
pub fn junit(outcome: &Outcome) -> Result<String> {
    let mut report = Report::new("accuracy gate");
    let mut suites: Vec<TestSuite> = Vec::new();
    for check in &outcome.checks {
        let message = with_causes(&check.message, &outcome.changes, &check.result);
        let status = match check.verdict {
            Verdict::Pass => TestCaseStatus::success(),
            Verdict::Inconclusive if outcome.verdict == Verdict::Pass => {
                let mut status = TestCaseStatus::skipped();
                status.set_message(message);
                status
            }
            Verdict::Fail | Verdict::Inconclusive => {
                let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
                status.set_type(check.verdict.name()).set_message(message);
                status
            }
        };
        let mut case = TestCase::new(check.name.clone(), status);
        case.set_classname(format!("{}.{}", check.result, check.profile));
        case.set_system_out(check.message.clone());
        match suites.iter_mut().find(|s| s.name.as_str() == check.result) {
            Some(suite) => {
                suite.add_test_case(case);
            }
            None => {
                let mut suite = TestSuite::new(check.result.clone());
                suite.add_test_case(case);
                suites.push(suite);
            }
        }
    }
    report.add_test_suites(suites);
    report.to_string().map_err(|e| Error::Internal(format!("JUnit XML: {e}")))
}
