//! Who may use the server.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use forebay_options::OptionName;
use rustix::system::uname;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::caller::{self, Caller};
use crate::error::ApiError;
use crate::server::ServerOptions;
use crate::sockets::Address;
use crate::{anthropic, ollama, openai, page};

/// Keys with which clients may use the server. They are kept as hashes, so that comparing them takes the same time for all.
#[derive(Clone, Default)]
pub struct Keys(Vec<[u8; 32]>);

impl Keys {
    /// Reads keys, one on each line. Empty lines and those that begin with `#` are ignored.
    pub fn read(text: &str) -> Keys {
        let lines = text.lines().map(str::trim);
        let keys = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        Keys(keys.map(|key| Sha256::digest(key).into()).collect())
    }

    /// Returns the number of different keys.
    pub fn count(&self) -> usize {
        self.0.iter().collect::<HashSet<_>>().len()
    }

    /// Returns true if there is no key, so that everybody may use the server.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn has(&self, key: &str) -> bool {
        let key: [u8; 32] = Sha256::digest(key).into();
        let equal = self.0.iter().map(|own| own.ct_eq(&key));
        equal.fold(subtle::Choice::from(0), |any, own| any | own).into()
    }
}

/// Rules for requests.
pub struct Rules {
    pub keys: Keys,
    /// Origins of web pages on other hosts that may use the server.
    pub origins: Vec<String>,
    /// Names of hosts by which clients may reach a server without keys, in lower case, beside those that always name this
    /// machine; `*` is all. Others are refused, because a web page could use such a name to reach it.
    pub hosts: Vec<String>,
    /// True if only programs of this machine can connect. Web pages of this machine may then use the server.
    pub is_local: bool,
    /// True if requests share keys and values of equal prefixes with requests of other API keys.
    pub shares_prefixes: bool,
}

impl Rules {
    pub fn new(options: &ServerOptions) -> Rules {
        let machine = uname();
        let machine = machine.nodename().to_string_lossy().to_ascii_lowercase();
        let local = format!("{}.local", machine.split('.').next().unwrap_or_default());
        let allowed = options.hosts.iter().map(|host| name_of(host));
        // No web page can connect to a Unix socket, and its clients have no name to send.
        let any = matches!(options.address, Address::Unix(_)).then(|| "*".to_owned());
        Rules {
            keys: options.keys.clone(),
            origins: options.origins.clone(),
            hosts: allowed
                .chain([machine, local])
                .chain(any)
                .filter(|host| !host.is_empty())
                .collect(),
            is_local: options.address.is_local(),
            shares_prefixes: options.shares_prefixes,
        }
    }

    /// Returns true if a `Host` header may reach a server without keys.
    fn is_allowed(&self, host: &str) -> bool {
        let name = name_of(host);
        let listed = self.hosts.iter().any(|allowed| *allowed == name || allowed == "*");
        listed || names_this_machine(&name)
    }

    /// Returns who sends a request with these headers from this address, or by a Unix socket.
    pub fn caller(&self, headers: &HeaderMap, address: Option<IpAddr>) -> Caller {
        let owner = owner(headers);
        let share = match self.keys.is_empty() {
            true => caller::share_of_remote(address),
            false => caller::share_of_owner(&owner),
        };
        Caller::new(&owner, self.namespace_of(&owner), share)
    }

    /// Returns who sends the requests of an owner's batch.
    pub fn caller_of_batch(&self, owner: &str) -> Caller {
        Caller::new(owner, self.namespace_of(owner), caller::share_of_owner(owner))
    }

    /// Returns the caller of work that the server does for itself.
    pub fn server_itself(&self) -> Caller {
        let owner = "the server";
        Caller::new(owner, self.namespace_of(owner), caller::share_of_owner(owner))
    }

    /// Returns the namespace of the prefixes of an owner. Without keys, all clients are one.
    fn namespace_of(&self, owner: &str) -> Vec<u8> {
        match self.shares_prefixes || self.keys.is_empty() {
            true => Vec::new(),
            false => owner.as_bytes().to_vec(),
        }
    }
}

/// Refuses requests that break the rules. Health and the web page need no key.
pub async fn check(State(rules): State<Arc<Rules>>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    match refusal(&rules, path, request.headers()) {
        None => next.run(request).await,
        Some(error) => refused(path, error),
    }
}

fn refusal(rules: &Rules, path: &str, headers: &HeaderMap) -> Option<ApiError> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(HOST).unwrap_or_default();
    if rules.keys.is_empty() && !rules.is_allowed(host) {
        let name = name_of(host);
        let why = format!(
            "host {name:?} is not this machine: {} allows it",
            OptionName::AllowedHost.with(&name)
        );
        return Some(ApiError::new(StatusCode::FORBIDDEN, why));
    }
    if let Some(origin) = text(ORIGIN)
        && !allows_origin(&rules.origins, rules.is_local, origin)
        && origin.split_once("://").is_none_or(|(_, of)| of != host)
    {
        let why = format!(
            "web pages of {origin} may not use this server: {} allows it",
            OptionName::Cors
        );
        return Some(ApiError::new(StatusCode::FORBIDDEN, why));
    }
    if rules.keys.is_empty() || is_public(path) {
        return None;
    }
    match sent_key(headers) {
        Some(key) if rules.keys.has(key) => None,
        Some(_) => Some(ApiError::new(StatusCode::UNAUTHORIZED, "the API key is wrong")),
        None => {
            let why = "an API key is missing: send it as Authorization: Bearer KEY or X-Api-Key";
            Some(ApiError::new(StatusCode::UNAUTHORIZED, why))
        }
    }
}

/// Returns true if a path needs no key: health and the web page.
pub fn is_public(path: &str) -> bool {
    path == "/health" || path == "/ready" || page::is_public(path)
}

/// Returns the key that a client sent.
fn sent_key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(AUTHORIZATION.as_str()).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| text("x-api-key"))
}

/// Returns the beginning of the hash of the key that a client sent, for logs.
pub fn key_hash(headers: &HeaderMap) -> Option<String> {
    let hash = Sha256::digest(sent_key(headers)?);
    Some(hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the hash of the key that a client sent, which tells one client from another. All that send none are one.
fn owner(headers: &HeaderMap) -> String {
    let hash = Sha256::digest(sent_key(headers).unwrap_or_default());
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns true if a web page of this origin may use the server: one of `origins`, and of this machine if the server `is_local`.
pub fn allows_origin(origins: &[String], is_local: bool, origin: &str) -> bool {
    let is_of_this_machine = || {
        let host = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        let is_other =
            |name: &str| name.parse::<IpAddr>().is_ok_and(|address| !address.is_loopback());
        host.map(name_of).is_some_and(|name| names_this_machine(&name) && !is_other(&name))
    };
    origins.iter().any(|allowed| allowed == origin || allowed == "*")
        || is_local && is_of_this_machine()
}

/// Returns the name in a `Host` header, without a port and in lower case.
fn name_of(host: &str) -> String {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.trim_end_matches('.').to_ascii_lowercase()
}

/// Returns true if a name always means this machine. A web page cannot make an address mean another machine.
fn names_this_machine(name: &str) -> bool {
    name == "localhost" || name.ends_with(".localhost") || name.parse::<IpAddr>().is_ok()
}

/// Returns an error in the form of the interface to which the path belongs.
pub fn refused(path: &str, error: ApiError) -> Response {
    if path.starts_with("/v1/messages") {
        anthropic::Failure::from(error).into_response()
    } else if path.starts_with("/api/") {
        ollama::Failure::from(error).into_response()
    } else {
        openai::Failure::from(error).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(rules: &Rules, path: &str, headers: &[(&'static str, &str)]) -> Option<u16> {
        let mut map = HeaderMap::new();
        map.insert(HOST, "localhost:8080".parse().unwrap());
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        refusal(rules, path, &map).map(|error| error.status.as_u16())
    }

    #[test]
    fn keys_are_asked_for_everywhere_but_for_health() {
        let keys = Keys::read("# of the lab\nsecret\n\n  other  \n");
        let rules = Rules {
            keys,
            origins: Vec::new(),
            hosts: Vec::new(),
            is_local: true,
            shares_prefixes: false,
        };
        assert_eq!((rules.keys.count(), Keys::read("a\nb\na").count()), (2, 2));
        let chat = "/v1/chat/completions";
        assert_eq!(status(&rules, chat, &[]), Some(401));
        assert_eq!(status(&rules, chat, &[("authorization", "Bearer secret")]), None);
        assert_eq!(status(&rules, chat, &[("authorization", "bearer other")]), None);
        assert_eq!(status(&rules, "/v1/messages", &[("x-api-key", "secret")]), None);
        assert_eq!(status(&rules, chat, &[("authorization", "Basic secret")]), Some(401));
        for wrong in ["secre", "secretx", "", "# of the lab"] {
            assert_eq!(status(&rules, chat, &[("x-api-key", wrong)]), Some(401), "{wrong}");
        }
        assert_eq!(status(&rules, "/health", &[]), None);
        assert_eq!(status(&rules, "/metrics", &[]), Some(401));
    }

    #[test]
    fn web_pages_of_others_cannot_reach_a_local_server() {
        let local = Rules {
            keys: Keys::default(),
            origins: Vec::new(),
            hosts: vec!["box".into(), name_of("Gateway.example.com:80")],
            is_local: true,
            shares_prefixes: false,
        };
        for good in
            ["box", "BOX:80", "gateway.example.com", "gateway.example.com:8080", "192.0.2.1"]
        {
            assert_eq!(status(&local, "/", &[("host", good)]), None, "{good}");
        }
        for good in ["localhost", "127.0.0.1:8080", "[::1]:8080", "a.localhost:1", "LOCALHOST."] {
            assert_eq!(status(&local, "/", &[("host", good)]), None, "{good}");
        }
        for bad in [
            "example.com",
            "localhost.example.com:8080",
            "",
            "box.example.com",
            "192.0.2.1.example.com",
            "evilbox",
            "*",
        ] {
            assert_eq!(status(&local, "/", &[("host", bad)]), Some(403), "{bad}");
        }
        let evil = ("origin", "https://example.com");
        assert_eq!(status(&local, "/", &[evil]), Some(403));
        for own in [
            "http://localhost:8080",
            "http://localhost:3000",
            "https://localhost",
            "http://127.0.0.1:5173",
            "http://[::1]:1",
        ] {
            assert_eq!(status(&local, "/", &[("origin", own)]), None, "{own}");
        }
        for other in ["http://192.168.1.2:3000", "http://localhost.example.com", "ftp://localhost"]
        {
            assert_eq!(status(&local, "/", &[("origin", other)]), Some(403), "{other}");
        }
        assert_eq!(status(&local, "/", &[("origin", "null")]), Some(403));
        // A name that another machine gave this address: its pages have the origin that they ask for.
        let rebound = [("host", "evil.com:8080"), ("origin", "http://evil.com:8080")];
        assert_eq!(status(&local, "/v1/models", &rebound), Some(403));
        let open = Rules { origins: vec!["https://example.com".into()], ..local };
        assert_eq!(status(&open, "/", &[evil]), None);
        let any = Rules { hosts: vec!["*".into()], ..open };
        assert_eq!(status(&any, "/", &[("host", "example.com")]), None);
        let keys = Rules { keys: Keys::read("a"), hosts: Vec::new(), ..any };
        let key = ("x-api-key", "a");
        assert_eq!(status(&keys, "/v1/models", &[("host", "example.com"), key]), None);
    }
}
