//! URLs of jobs in object stores, and how the stores are opened.
//!
//! Credentials and settings come from the environment, under the names that the crate `object_store` defines.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path as Key;
use object_store::{ClientConfigKey, ObjectStore, RetryConfig};

use super::fault;
use crate::{Error, Result};

/// The time for one request, which transfers at most one part, unless the environment sets it.
const TIMEOUT: &str = "120s";

type Open = fn(&str) -> object_store::Result<Arc<dyn ObjectStore>>;

/// How the stores of a scheme are opened, by the name of the bucket or container.
const SCHEMES: [(&str, Open); 3] = [("s3", s3), ("gs", google), ("az", azure)];

pub(super) struct Location {
    scheme: &'static str,
    open: Open,
    bucket: String,
    pub(super) prefix: Key,
}

impl Location {
    pub(super) fn parse(url: &Path) -> Result<Self> {
        // A wrong URL is not repeated: it may contain a password.
        let wrong = |reason: &str| {
            Error::usage(
                format!("the URL of the object store {reason}"),
                "give a URL such as s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, or a directory; \
                credentials are read from the environment",
            )
        };
        let text = url.to_str().ok_or_else(|| wrong("is not valid UTF-8"))?;
        let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
        let known = SCHEMES.iter().find(|(name, _)| *name == scheme);
        let (scheme, open) = *known.ok_or_else(|| wrong("does not begin with s3://, gs:// or az://"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
        if bucket.is_empty() || !bucket.bytes().all(is_plain) {
            return Err(wrong("has no valid name of a bucket or container"));
        }
        let prefix = prefix.trim_end_matches('/');
        if prefix.bytes().any(|b| !is_plain(b) && !b"/=".contains(&b)) {
            return Err(wrong("has a prefix with characters other than letters, digits and -._=/"));
        }
        let prefix = Key::parse(prefix).map_err(|_| wrong("has an invalid prefix"))?;
        Ok(Self { scheme, open, bucket: bucket.to_owned(), prefix })
    }

    pub(super) fn url(&self) -> String {
        format!("{}://{}/{}", self.scheme, self.bucket, self.prefix)
    }

    /// Opens the store with the credentials and settings in the environment.
    pub(super) fn open(&self) -> Result<Arc<dyn ObjectStore>> {
        (self.open)(&self.bucket).map_err(|e| fault::explained(&self.url(), "be opened", &e))
    }
}

fn retry() -> RetryConfig {
    RetryConfig { max_retries: 100, retry_timeout: Duration::from_secs(30), ..RetryConfig::default() }
}

fn is_unset(variable: &str) -> bool {
    std::env::var_os(variable).is_none()
}

fn s3(bucket: &str) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry());
    if is_unset("AWS_TIMEOUT") {
        builder = builder.with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), TIMEOUT);
    }
    let value = |key: AmazonS3ConfigKey| builder.get_config_value(&key);
    let endpoint = value(AmazonS3ConfigKey::S3Endpoint).or(value(AmazonS3ConfigKey::Endpoint));
    let allowed = value(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp)).unwrap_or_default();
    let is_allowed = ["1", "true", "on", "yes", "y"].contains(&allowed.to_ascii_lowercase().as_str());
    if endpoint.is_some_and(|e| e.starts_with("http://")) && !is_allowed {
        let source = "AWS_ENDPOINT is not encrypted (http://); AWS_ALLOW_HTTP=true allows that".into();
        return Err(object_store::Error::Generic { store: "S3", source });
    }
    Ok(Arc::new(builder.build()?))
}

fn google(bucket: &str) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket).with_retry(retry());
    if is_unset("GOOGLE_TIMEOUT") {
        builder = builder.with_config(GoogleConfigKey::Client(ClientConfigKey::Timeout), TIMEOUT);
    }
    Ok(Arc::new(builder.build()?))
}

fn azure(container: &str) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = MicrosoftAzureBuilder::from_env().with_container_name(container).with_retry(retry());
    if is_unset("AZURE_TIMEOUT") {
        builder = builder.with_config(AzureConfigKey::Client(ClientConfigKey::Timeout), TIMEOUT);
    }
    Ok(Arc::new(builder.build()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_urls_are_accepted() {
        for (url, shown) in [
            ("s3://bucket/a/b", "s3://bucket/a/b"),
            ("gs://my.bucket/jobs/date=2026/", "gs://my.bucket/jobs/date=2026"),
            ("az://container", "az://container/"),
        ] {
            assert_eq!(Location::parse(Path::new(url)).unwrap().url(), shown);
        }
        for url in [
            "http://host/job",
            "s3://",
            "s3:///job",
            "s3://key:hunter22@bucket/job",
            "s3://bucket/a//b",
            "s3://bucket/../other",
            "s3://bucket/a/./b",
            "s3://bucket/%2e%2e/x",
            "s3://bucket/job?token=hunter22",
            "s3://bucket/\u{1b}[31m",
        ] {
            let error = Location::parse(Path::new(url)).err().unwrap();
            assert_eq!(error.category().exit_code(), 2, "{url}");
            assert!(!error.to_string().contains("hunter22"), "{error}");
        }
    }
}
