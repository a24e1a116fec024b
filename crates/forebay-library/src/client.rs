//! HTTP requests: redirects, tokens, errors and retries.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ureq::http::{HeaderMap, Response, Uri};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::{Error, Options};

/// Redirects that a request follows.
const REDIRECTS: usize = 8;
/// Failures in a row after which a download is given up.
const ATTEMPTS: u32 = 6;
/// Longest wait before the next attempt, and longest wait that a server may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(300);
/// Step in which a wait looks for cancellation.
const STEP: Duration = Duration::from_millis(50);

/// Why an attempt failed.
pub enum Trouble {
    /// Another attempt may succeed.
    Passing { error: Error, after: Option<Duration>, progressed: bool },
    /// Another attempt would fail, too.
    Lasting(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Lasting(error)
    }
}

/// Sends requests to one hub, and to the hosts that it redirects to.
pub struct Client {
    agent: Agent,
    /// Scheme, host and port of the hub. Only they receive the token.
    origin: String,
    pub endpoint: String,
    repository: String,
    token: Option<String>,
    backoff: Duration,
}

impl Client {
    pub fn new(repository: &str, options: &Options) -> Result<Client, Error> {
        let endpoint = options.endpoint.trim_end_matches('/').to_owned();
        let bad = |why: &str| Error::Network { url: endpoint.clone(), why: why.into() };
        let uri: Uri = endpoint.parse().map_err(|_| bad("is not a URL"))?;
        let origin = origin(&uri).ok_or_else(|| bad("is not a URL with http or https"))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::PlatformVerifier)
            .unversioned_rustls_crypto_provider(provider)
            .build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections_per_host(options.connections.max(1))
            .timeout_connect(Some(options.timeout))
            .timeout_per_read(Some(options.timeout))
            .timeout_per_write(Some(options.timeout))
            .user_agent(concat!("forebay/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Ok(Client {
            agent,
            origin,
            endpoint,
            repository: repository.to_owned(),
            token: options.token.clone(),
            backoff: options.backoff,
        })
    }

    /// Returns true if a URL lies on the hub itself.
    pub fn is_own(&self, url: &str) -> bool {
        url.parse().ok().and_then(|uri| origin(&uri)).is_some_and(|origin| origin == self.origin)
    }

    /// Requests a URL, or a range of it (first and last byte), and follows redirects. The response is 200 or 206.
    pub fn get(&self, url: &str, range: Option<(u64, u64)>) -> Result<Response<Body>, Trouble> {
        let mut url = url.to_owned();
        for _ in 0..=REDIRECTS {
            let mut request = self.agent.get(&url);
            if let (Some(token), true) = (&self.token, self.is_own(&url)) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            if let Some((first, last)) = range {
                request = request.header("Range", format!("bytes={first}-{last}"));
            }
            let response = request.call().map_err(|error| failed(&url, &error))?;
            match response.status().as_u16() {
                200 | 206 => return Ok(response),
                301 | 302 | 303 | 307 | 308 => url = redirected(&url, response.headers())?,
                _ => return Err(self.refused(&url, &response)),
            }
        }
        Err(Error::Network { url, why: "the server redirects without end".into() }.into())
    }

    /// Runs `work` until it succeeds, fails for good, or has failed too often without progress.
    pub fn retry<T>(
        &self,
        stopped: &dyn Fn() -> bool,
        mut work: impl FnMut() -> Result<T, Trouble>,
    ) -> Result<T, Error> {
        let mut failures = 0;
        loop {
            if stopped() {
                return Err(Error::Cancelled);
            }
            let (error, after) = match work() {
                Ok(value) => return Ok(value),
                Err(Trouble::Lasting(error)) => return Err(error),
                Err(Trouble::Passing { error, after, progressed }) => {
                    failures = if progressed { 1 } else { failures + 1 };
                    (error, after)
                }
            };
            if failures >= ATTEMPTS || after.is_some_and(|wait| wait > LONGEST_RETRY_AFTER) {
                return Err(error);
            }
            let usual = (self.backoff * 2_u32.pow(failures - 1)).min(LONGEST_WAIT);
            let end = Instant::now() + after.unwrap_or(usual);
            while Instant::now() < end {
                if stopped() {
                    return Err(Error::Cancelled);
                }
                thread::sleep(STEP.min(end.saturating_duration_since(Instant::now())));
            }
        }
    }

    /// Returns the error for an answer that is neither content nor a redirect.
    fn refused(&self, url: &str, response: &Response<Body>) -> Trouble {
        let status = response.status().as_u16();
        let header =
            |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let denied = |why: &str| {
            let why = why.to_owned();
            Trouble::Lasting(Error::Denied { repository: self.repository.clone(), why })
        };
        match (status, header("x-error-code")) {
            (408 | 429 | 500..=599, _) => {
                let after = header("retry-after").and_then(|seconds| seconds.trim().parse().ok());
                let after = after.map(Duration::from_secs);
                let error = Error::Status { url: shown(url), status };
                Trouble::Passing { error, after, progressed: false }
            }
            (_, Some("GatedRepo")) if self.token.is_some() => denied(
                "is gated, and this token has no access: accept the conditions on the page of the model",
            ),
            (_, Some("GatedRepo")) => denied(
                "is gated: accept the conditions on the page of the model, then set HF_TOKEN to a token of your account",
            ),
            (_, Some("RevisionNotFound")) => denied("has no such revision"),
            (401, _) if self.is_own(url) && self.token.is_none() => denied(
                "does not exist, or is private or gated: check the name, or set HF_TOKEN to a token of your account",
            ),
            (401 | 403, _) if self.is_own(url) => denied(
                "the server refuses this token (HF_TOKEN, or the file of huggingface-cli login): check it, and your access to the model",
            ),
            (404, _) if url.contains("/api/models/") => denied("does not exist: check the name"),
            (404, _) => Trouble::Lasting(Error::Missing { url: shown(url) }),
            _ => Trouble::Lasting(Error::Status { url: shown(url), status }),
        }
    }
}

/// Returns the trouble of a request that got no answer. A certificate that is refused once is refused again.
fn failed(url: &str, error: &ureq::Error) -> Trouble {
    let is_about_encryption = match error {
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => true,
        ureq::Error::Io(error) => error.kind() == io::ErrorKind::InvalidData,
        _ => false,
    };
    match is_about_encryption {
        true => {
            let why = format!("no encrypted connection: {error}");
            Trouble::Lasting(Error::Network { url: shown(url), why })
        }
        false => passing(url, &error.to_string()),
    }
}

/// Returns the trouble of a connection that failed.
pub fn passing(url: &str, why: &str) -> Trouble {
    let error = Error::Network { url: shown(url), why: why.to_owned() };
    Trouble::Passing { error, after: None, progressed: false }
}

/// Returns a URL without its query, which may hold a signature.
pub fn shown(url: &str) -> String {
    url.split('?').next().unwrap_or_default().to_owned()
}

/// Returns scheme, host and port.
fn origin(uri: &Uri) -> Option<String> {
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    let usual_port = match scheme.as_str() {
        "http" => 80,
        "https" => 443,
        _ => return None,
    };
    let host = uri.host()?.to_ascii_lowercase();
    Some(format!("{scheme}://{host}:{}", uri.port_u16().unwrap_or(usual_port)))
}

/// Returns the URL that a redirect leads to.
fn redirected(from: &str, headers: &HeaderMap) -> Result<String, Error> {
    let bad = |why: &str| Error::Network { url: shown(from), why: why.into() };
    let location = headers
        .get("location")
        .and_then(|value| value.to_str().ok())
        .ok_or_else(|| bad("the server redirects to nowhere"))?;
    let (scheme, rest) = from.split_once("://").ok_or_else(|| bad("is not a URL"))?;
    let host = rest.split(['/', '?']).next().unwrap_or_default();
    let to = match location {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{host}{location}"),
        _ => location.to_owned(),
    };
    let uri: Uri =
        to.parse().map_err(|_| bad("the server redirects to something that is no URL"))?;
    let target =
        origin(&uri).ok_or_else(|| bad("the server redirects to something that is no URL"))?;
    if scheme.eq_ignore_ascii_case("https") && !target.starts_with("https:") {
        return Err(bad("the server redirects to a connection without encryption"));
    }
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(from: &str, location: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert("location", location.parse().unwrap());
        redirected(from, &headers).ok()
    }

    #[test]
    fn redirects_in_all_forms() {
        let from = "https://a.b:8443/x?y=1";
        assert_eq!(to(from, "/z").as_deref(), Some("https://a.b:8443/z"));
        assert_eq!(to(from, "//c.d/z").as_deref(), Some("https://c.d/z"));
        assert_eq!(to(from, "https://c.d/z?s").as_deref(), Some("https://c.d/z?s"));
        for refused in ["http://c.d/z", "file:///etc/passwd", "z", ""] {
            assert_eq!(to(from, refused), None, "{refused}");
        }
    }

    #[test]
    fn a_refused_certificate_is_not_tried_again() {
        let lasts = |error| matches!(failed("https://a.b/", &error), Trouble::Lasting(_));
        let refused = rustls::Error::InvalidCertificate(rustls::CertificateError::BadSignature);
        let refused = io::Error::new(io::ErrorKind::InvalidData, refused);
        assert!(lasts(ureq::Error::Io(refused)));
        assert!(lasts(ureq::Error::Rustls(rustls::Error::DecryptError)));
        assert!(!lasts(ureq::Error::Io(io::ErrorKind::ConnectionReset.into())));
        assert!(!lasts(ureq::Error::HostNotFound));
    }

    #[test]
    fn only_the_hub_is_the_hub() {
        let options = Options { endpoint: "https://hub.test/".into(), ..Options::default() };
        let client = Client::new("o/r", &options).unwrap();
        for own in ["https://hub.test/a", "https://HUB.test:443/b?c"] {
            assert!(client.is_own(own), "{own}");
        }
        let others = [
            "http://hub.test/a",
            "https://hub.test:8443/a",
            "https://hub.test.evil/a",
            "https://hub.test@evil/a",
            "https://cdn.hub.test/a",
        ];
        for other in others {
            assert!(!client.is_own(other), "{other}");
        }
        for wrong in ["hub.test", "ftp://hub.test", "file:///x", ""] {
            let options = Options { endpoint: wrong.into(), ..Options::default() };
            assert!(Client::new("o/r", &options).is_err(), "{wrong}");
        }
    }
}
