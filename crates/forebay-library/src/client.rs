//! HTTP requests: redirects, tokens, errors and retries.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
/// The same for a hub that has never answered: this machine is probably offline.
const FIRST_ATTEMPTS: u32 = 2;
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

/// Hears why a request is tried again, from any thread.
#[derive(Clone, Default)]
pub struct Notice(Option<Arc<Hear>>);

type Hear = dyn Fn(&str) + Send + Sync;

impl Notice {
    /// Calls `hear` with a sentence before each further attempt.
    pub fn new(hear: impl Fn(&str) + Send + Sync + 'static) -> Notice {
        Notice(Some(Arc::new(hear)))
    }

    fn tell(&self, why: &str) {
        if let Some(hear) = &self.0 {
            hear(why);
        }
    }
}

impl fmt::Debug for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notice")
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
    connect_timeout: Duration,
    timeout: Duration,
    notice: Notice,
    /// True once any host has answered.
    has_answered: AtomicBool,
    /// Bytes of lists and headers that have arrived.
    pub received_bytes: AtomicU64,
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
            .timeout_resolve(Some(options.connect_timeout))
            .timeout_connect(Some(options.connect_timeout))
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
            connect_timeout: options.connect_timeout,
            timeout: options.timeout,
            notice: options.notice.clone(),
            has_answered: AtomicBool::new(false),
            received_bytes: AtomicU64::new(0),
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
            let response = request.call().map_err(|error| self.failed(&url, &error))?;
            self.has_answered.store(true, Ordering::Relaxed);
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
            let most = match self.has_answered.load(Ordering::Relaxed) {
                true => ATTEMPTS,
                false => FIRST_ATTEMPTS,
            };
            if failures >= most || after.is_some_and(|wait| wait > LONGEST_RETRY_AFTER) {
                return Err(error);
            }
            let usual = (self.backoff * 2_u32.pow(failures - 1)).min(LONGEST_WAIT);
            let wait = after.unwrap_or(usual);
            let seconds = wait.as_secs_f64().ceil();
            self.notice.tell(&format!("{error}; trying again in {seconds} s"));
            let end = Instant::now() + wait;
            while Instant::now() < end {
                if stopped() {
                    return Err(Error::Cancelled);
                }
                thread::sleep(STEP.min(end.saturating_duration_since(Instant::now())));
            }
        }
    }

    /// Returns the trouble of a request that got no answer. A certificate that is refused once is refused again.
    fn failed(&self, url: &str, error: &ureq::Error) -> Trouble {
        let is_about_encryption = match error {
            ureq::Error::Rustls(_) | ureq::Error::Tls(_) => true,
            ureq::Error::Io(error) => error.kind() == io::ErrorKind::InvalidData,
            _ => false,
        };
        if is_about_encryption {
            let why = format!("no encrypted connection: {error}");
            return Trouble::Lasting(Error::Network { url: shown(url), why });
        }
        let why = match error {
            ureq::Error::HostNotFound => UNKNOWN_HOST.to_owned(),
            ureq::Error::Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => {
                format!("no connection within {} s", self.connect_timeout.as_secs_f64())
            }
            ureq::Error::Timeout(_) => {
                format!("no answer within {} s", self.timeout.as_secs_f64())
            }
            ureq::Error::Io(error) => in_words(error),
            other => other.to_string(),
        };
        let host = url.split_once("://").map_or(url, |(_, rest)| rest);
        let host = host.split(['/', '?']).next().unwrap_or_default().to_owned();
        let error = Error::Unreachable { host, why };
        Trouble::Passing { error, after: None, progressed: false }
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

/// Reason that a name cannot be resolved.
const UNKNOWN_HOST: &str = "its name cannot be resolved: check the network connection";

/// Returns an error of the network in plain words.
pub fn in_words(error: &io::Error) -> String {
    let text = error.to_string();
    match error.kind() {
        _ if text.contains("lookup address") => UNKNOWN_HOST.to_owned(),
        io::ErrorKind::ConnectionRefused => "the connection is refused".to_owned(),
        io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::UnexpectedEof => "the connection broke off".to_owned(),
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable => {
            "there is no route to it: check the network connection".to_owned()
        }
        io::ErrorKind::TimedOut => "no answer in time".to_owned(),
        _ => text,
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
        let client = Client::new("o/r", &Options::default()).unwrap();
        let failed = |error| client.failed("https://a.b/", &error);
        let lasts = |error| matches!(failed(error), Trouble::Lasting(_));
        let refused = rustls::Error::InvalidCertificate(rustls::CertificateError::BadSignature);
        let refused = io::Error::new(io::ErrorKind::InvalidData, refused);
        assert!(lasts(ureq::Error::Io(refused)));
        assert!(lasts(ureq::Error::Rustls(rustls::Error::DecryptError)));
        assert!(!lasts(ureq::Error::Io(io::ErrorKind::ConnectionReset.into())));
        assert!(!lasts(ureq::Error::HostNotFound));
    }

    #[test]
    fn a_host_that_does_not_answer_is_named_in_plain_words() {
        let client = Client::new("o/r", &Options::default()).unwrap();
        let words = |error| match client.failed("https://a.b:8/c?d", &error) {
            Trouble::Passing { error, .. } | Trouble::Lasting(error) => error.to_string(),
        };
        let io = |kind: io::ErrorKind| ureq::Error::Io(kind.into());
        let dns = "failed to lookup address information: Temporary failure in name resolution";
        for (error, why) in [
            (ureq::Error::HostNotFound, UNKNOWN_HOST),
            (ureq::Error::Io(io::Error::other(dns)), UNKNOWN_HOST),
            (ureq::Error::Timeout(ureq::Timeout::Connect), "no connection within 5 s"),
            (ureq::Error::Timeout(ureq::Timeout::RecvResponse), "no answer within 20 s"),
            (io(io::ErrorKind::ConnectionRefused), "the connection is refused"),
            (io(io::ErrorKind::ConnectionReset), "the connection broke off"),
        ] {
            assert_eq!(words(error), format!("a.b:8 cannot be reached: {why}"));
        }
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
