//! Errors of object stores.

use object_store::Error as StoreError;

use crate::Error;
use crate::checkpoint::printable;

/// Variables whose values must not be printed have these words in their names.
const SECRET: [&str; 6] = ["KEY", "TOKEN", "SECRET", "PASSWORD", "SAS", "CREDENTIAL"];
const PREFIXES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];
/// Shorter values, such as `true`, are no secrets.
const MIN_SECRET: usize = 8;
const DENIED: [&str; 2] = ["status code: 401", "status code: 403"];
const REMEDY_OF_DENIAL: &str = "check the credentials in the environment (AWS_*, GOOGLE_* or AZURE_*), which must allow \
    to read, write, list and delete objects; then run the same command again";

/// Returns whether an error means that the object does not exist, although its bucket does.
pub(super) fn is_absent(error: &StoreError) -> bool {
    let text = || error.to_string();
    matches!(error, StoreError::NotFound { .. })
        && !["NoSuchBucket", "ContainerNotFound"].iter().any(|code| text().contains(code))
}

/// Returns the error for a request that failed. `action` says what it does, as in `read X`.
pub(super) fn explained(url: &str, action: &str, error: &StoreError) -> Error {
    let text = error.to_string();
    let remedy = match error {
        // Some requests report a refusal as a general error.
        _ if DENIED.iter().any(|status| text.contains(status)) => REMEDY_OF_DENIAL,
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => REMEDY_OF_DENIAL,
        StoreError::NotImplemented { .. } | StoreError::NotSupported { .. } => {
            "use a store that supports conditional writes, or a directory"
        }
        _ => {
            "check the network, the name of the bucket, and the settings in the environment (AWS_*, GOOGLE_* or \
            AZURE_*); then run the same command again"
        }
    };
    Error::Unavailable {
        what: format!("the object store {url}"),
        reason: format!("cannot {action}: {}", reason(&text)),
        remedy: remedy.into(),
    }
}

/// Shortens the text of an error. An error response repeats details of the request, of which only the code and the
/// message are kept.
fn reason(text: &str) -> String {
    let field = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        Some(rest.split_once(&format!("</{name}>"))?.0)
    };
    let before = text.split("<?xml").next().unwrap_or_default();
    let before = before.split("<Error>").next().unwrap_or_default().trim_end_matches([' ', ':']);
    let text = match (field("Code"), field("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message} ({before})"),
        _ => before.to_owned(),
    };
    let text = without_secrets(
        text,
        std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))),
    );
    let short: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(600).collect();
    short.split_whitespace().map(|word| printable(&without_login(word))).collect::<Vec<_>>().join(" ")
}

/// Removes the query and the user of a URL, which may be a signature and a password.
fn without_login(word: &str) -> String {
    let Some((scheme, rest)) = word.split_once("://") else { return word.to_owned() };
    let rest = rest.split('?').next().unwrap_or_default();
    let host = rest.split('/').next().unwrap_or_default();
    let user = host.rfind('@').map_or(0, |at| at + 1);
    format!("{scheme}://{}", &rest[user..])
}

/// Replaces the values of secret variables.
fn without_secrets(mut text: String, variables: impl Iterator<Item = (String, String)>) -> String {
    for (name, value) in variables {
        let is_secret = PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            && SECRET.iter().any(|word| name.contains(word))
            && value.len() >= MIN_SECRET;
        if is_secret {
            text = text.replace(&value, &format!("${name}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(text: &str) -> StoreError {
        StoreError::Generic { store: "S3", source: text.to_owned().into() }
    }

    #[test]
    fn secrets_are_not_printed() {
        let set = [("AWS_SECRET_ACCESS_KEY", "abcdefgh12"), ("AWS_REGION", "us-east-1"), ("AWS_TOKEN", "us")];
        let set = set.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let text = without_secrets("signed abcdefgh12 in us-east-1".into(), set.into_iter());
        assert_eq!(text, "signed $AWS_SECRET_ACCESS_KEY in us-east-1");
    }

    #[test]
    fn urls_have_no_login() {
        let text = reason("GET https://me:hunter22@host:9/b/k?sig=abc%2F&x=1 in 3ms - http://[::1]/k?a@b");
        assert_eq!(text, "GET https://host:9/b/k in 3ms - http://[::1]/k");
    }

    #[test]
    fn answers_are_shortened() {
        let answer = "Error performing GET http://host/bucket/key in 3ms - Server returned non-2xx status code: 403 \
            Forbidden: <?xml version=\"1.0\"?>\n<Error><Code>SignatureDoesNotMatch</Code><Message>The signature \
            differs.</Message><AWSAccessKeyId>AKIDEXAMPLE</AWSAccessKeyId><StringToSign>secret</StringToSign></Error>";
        let error = explained("s3://bucket/job", "read job.json", &failed(answer));
        let text = error.to_string();
        assert!(text.contains("s3://bucket/job") && text.contains("cannot read job.json"), "{text}");
        assert!(
            text.contains("SignatureDoesNotMatch: The signature differs.") && text.contains("403"),
            "{text}"
        );
        assert!(!text.contains("AKIDEXAMPLE") && !text.contains("secret"), "{text}");
        assert_eq!(error.category().exit_code(), 5);
        assert!(error.remedy().to_string().contains("credentials"), "{}", error.remedy());
        let long = explained("s3://b", "read x", &failed(&"\u{1b}[31m".repeat(1000))).to_string();
        assert!(long.len() < 4000 && !long.contains('\u{1b}'), "{long}");
    }

    #[test]
    fn a_missing_bucket_is_not_a_missing_object() {
        let missing = |text: &str| StoreError::NotFound { path: "x".into(), source: text.to_owned().into() };
        assert!(is_absent(&missing("<Code>NoSuchKey</Code>")));
        assert!(!is_absent(&missing("<Code>NoSuchBucket</Code>")));
        assert!(!is_absent(&failed("NoSuchKey")));
    }
}
