//! URLs: which store they name, which object in it, and how the store is reached.

use std::collections::HashMap;
use std::io;
use std::str::FromStr;
use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path as Key;
use object_store::{ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};

/// Services that URLs name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Service {
    S3,
    Google,
    Azure,
    Http,
}

/// A URL in parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Url {
    pub service: Service,
    /// Scheme and host or bucket, such as `s3://bucket`.
    pub base: String,
    /// What follows, without a slash in front.
    pub path: String,
    /// What follows `?` in a URL of HTTP. It may be a secret, so errors do not show it.
    pub query: Option<String>,
}

impl Url {
    /// Takes a URL apart. Returns words that say what is wrong with it.
    pub fn parse(text: &str) -> Result<Url, String> {
        let (scheme, rest) = text.split_once("://").ok_or("it has no scheme")?;
        let scheme = scheme.to_ascii_lowercase();
        let service = match scheme.as_str() {
            "s3" | "s3a" => Service::S3,
            "gs" => Service::Google,
            "az" | "azure" | "abfs" | "abfss" => Service::Azure,
            "http" | "https" => Service::Http,
            _ => {
                return Err(format!(
                    "there is no scheme {scheme:?}; there are s3, gs, az, abfss, http and https"
                ));
            }
        };
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) if service == Service::Http => (rest, Some(query.to_owned())),
            _ => (rest, None),
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.is_empty() {
            return Err("it names no bucket or server".to_owned());
        }
        if service == Service::Http && host.contains('@') {
            return Err("it has a password inside, which is not supported".to_owned());
        }
        let path = path.trim_end_matches('/').to_owned();
        Ok(Url { service, base: format!("{scheme}://{host}"), path, query })
    }

    /// Returns the URL as errors show it, which is also the name of the file.
    pub fn name(&self) -> String {
        match self.path.is_empty() {
            true => self.base.clone(),
            false => format!("{}/{}", self.base, self.path),
        }
    }

    /// Returns the object's key.
    pub fn key(&self) -> io::Result<Key> {
        // Only URLs of HTTP are percent-encoded. Names of objects are what they are.
        let parsed = match self.service {
            Service::Http => Key::from_url_path(&self.path),
            _ => Key::parse(&self.path),
        };
        parsed.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))
    }
}

/// Settings of a store by name, as object_store has them, such as `aws_region`.
pub(super) type Settings = HashMap<String, String>;

/// Returns the settings that this service understands, or words that name one that it does not.
fn keys<K: FromStr>(settings: &Settings) -> Result<Vec<(K, String)>, String> {
    let parse = |(name, value): (&String, &String)| {
        let key = K::from_str(&name.to_ascii_lowercase());
        let key = key.map_err(|_| format!("there is no option {name:?} for this URL"))?;
        Ok((key, value.clone()))
    };
    settings.iter().map(parse).collect()
}

/// Connects to the store of a URL. `settings` come before those of the environment.
pub(super) fn connect(url: &Url, settings: &Settings) -> Result<Arc<dyn ObjectStore>, String> {
    // Repeating is done by the reader, which keeps what has arrived.
    let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let mut settings = settings.clone();
    if !settings.keys().any(|name| name.eq_ignore_ascii_case("timeout")) {
        // A long body is no error. The reader ends requests that hang.
        settings.insert("timeout".to_owned(), "1day".to_owned());
    }
    // An address without TLS is there because the user wants none.
    let is_plain = |endpoint: Option<String>| {
        endpoint.is_some_and(|endpoint| endpoint.to_ascii_lowercase().starts_with("http://"))
    };
    let base = &url.base;
    let store: Result<Arc<dyn ObjectStore>, object_store::Error> = match url.service {
        Service::S3 => {
            let mut builder = AmazonS3Builder::from_env().with_url(base).with_retry(retry);
            for (key, value) in keys::<AmazonS3ConfigKey>(&settings)? {
                builder = builder.with_config(key, value);
            }
            if is_plain(builder.get_config_value(&AmazonS3ConfigKey::Endpoint)) {
                builder = builder.with_allow_http(true);
            }
            builder.build().map(|store| Arc::new(store) as _)
        }
        Service::Google => {
            let mut builder =
                GoogleCloudStorageBuilder::from_env().with_url(base).with_retry(retry);
            for (key, value) in keys::<GoogleConfigKey>(&settings)? {
                builder = builder.with_config(key, value);
            }
            if is_plain(builder.get_config_value(&GoogleConfigKey::BaseUrl)) {
                let allow = GoogleConfigKey::Client(ClientConfigKey::AllowHttp);
                builder = builder.with_config(allow, "true");
            }
            builder.build().map(|store| Arc::new(store) as _)
        }
        Service::Azure => {
            let mut builder = MicrosoftAzureBuilder::from_env().with_url(base).with_retry(retry);
            for (key, value) in keys::<AzureConfigKey>(&settings)? {
                builder = builder.with_config(key, value);
            }
            if is_plain(builder.get_config_value(&AzureConfigKey::Endpoint)) {
                builder = builder.with_allow_http(true);
            }
            builder.build().map(|store| Arc::new(store) as _)
        }
        Service::Http => {
            let mut options = ClientOptions::new().with_allow_http(true);
            for (key, value) in keys::<ClientConfigKey>(&settings)? {
                options = options.with_config(key, value);
            }
            let base = match &url.query {
                Some(query) => format!("{base}/?{query}"),
                None => format!("{base}/"),
            };
            let builder = HttpBuilder::new().with_url(base).with_client_options(options);
            builder.with_retry(retry).build().map(|store| Arc::new(store) as _)
        }
    };
    store.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_in_parts() {
        let of = |text| Url::parse(text).map(|url| (url.name(), url.path.clone(), url.query));
        let plain = |name: &str, path: &str| Ok((name.to_owned(), path.to_owned(), None));
        assert_eq!(of("s3://bucket/a/b c?.gguf"), plain("s3://bucket/a/b c?.gguf", "a/b c?.gguf"));
        assert_eq!(of("S3://bucket/a/"), plain("s3://bucket/a", "a"));
        assert_eq!(of("gs://bucket"), plain("gs://bucket", ""));
        let azure = "abfss://box@account.dfs.core.windows.net/k";
        assert_eq!(of(azure), plain(azure, "k"));
        let signed = of("https://host:1/a%20b.gguf?secret=1").unwrap();
        assert_eq!(signed.0, "https://host:1/a%20b.gguf");
        assert_eq!(signed.2.as_deref(), Some("secret=1"));
        assert_eq!(Url::parse("http://h/a%20b").unwrap().key().unwrap().as_ref(), "a b");
        assert_eq!(Url::parse("s3://h/a%20b").unwrap().key().unwrap().as_ref(), "a%20b");
        assert!(Url::parse("s3://h/a//b").unwrap().key().is_err());
        for wrong in ["ftp://host/a", "s3:///key", "https://me:word@host/a"] {
            assert!(Url::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn options_that_a_service_does_not_have_are_errors() {
        let url = Url::parse("s3://bucket/key").unwrap();
        let settings = |name: &str, value: &str| {
            Settings::from([
                (name.to_owned(), value.to_owned()),
                ("aws_access_key_id".to_owned(), "a".to_owned()),
                ("AWS_SECRET_ACCESS_KEY".to_owned(), "b".to_owned()),
            ])
        };
        super::super::choose_tls();
        assert!(connect(&url, &settings("region", "eu-west-1")).is_ok());
        assert!(connect(&url, &settings("endpoint", "http://localhost:1")).is_ok());
        let error = connect(&url, &settings("area", "eu-west-1")).err().unwrap();
        assert!(error.contains("area"), "{error}");
    }
}
