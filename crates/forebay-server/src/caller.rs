//! Who sent a request.
//!
//! Every handler gets a [`Caller`] and passes it on to whatever callers share. There is no default and no hidden variable, so
//! work that is polled elsewhere, such as that of a stream that begins late, cannot lose it.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use forebay_requests::Caller as EngineCaller;
use sha2::{Digest as _, Sha256};

use crate::access;
use crate::access_log::Note;
use crate::error::ApiError;

/// Who sent a request, and what the access log learns about the request.
#[derive(Clone)]
pub struct Caller {
    owner: Arc<str>,
    engine: EngineCaller,
    note: Arc<Note>,
}

/// Number that tells one caller from another where callers take turns: that of a key, or without keys that of an address.
pub type Share = u64;

impl Caller {
    /// Creates the caller of a new request. `owner` is the hash of its key in hexadecimal digits.
    pub fn new(owner: &str, namespace: Vec<u8>, share: Share) -> Caller {
        let (engine, note) = (EngineCaller { namespace, share }, Arc::default());
        Caller { owner: owner.into(), engine, note }
    }

    /// Returns the owner of the files, batches and responses that this caller sees.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// Returns the number that tells this caller from others.
    pub fn share(&self) -> Share {
        self.engine.share
    }

    /// Returns the caller in the form for the engine.
    pub fn engine(&self) -> &EngineCaller {
        &self.engine
    }

    /// Returns what the access log learns about the request.
    pub fn note(&self) -> &Arc<Note> {
        &self.note
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, Response> {
        let caller = parts.extensions.get::<Caller>().cloned();
        caller.ok_or_else(|| {
            // Every request gets its caller before it is routed.
            tracing::error!("{}: the request has no caller", parts.uri.path());
            let why = "the server could not tell who sent the request";
            let error = ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why);
            access::refused(parts.uri.path(), error)
        })
    }
}

/// Returns the number of an owner.
pub fn share_of_owner(owner: &str) -> Share {
    share(b"owner", owner.as_bytes())
}

/// Returns the number of an address. Addresses of one IPv6 network of 64 bits are one.
pub fn share_of_address(address: IpAddr) -> Share {
    match address.to_canonical() {
        IpAddr::V4(address) => share(b"v4", &address.octets()),
        IpAddr::V6(address) => share(b"v6", &address.octets()[..8]),
    }
}

/// Returns the number of a connection's other end. Programs that use a Unix socket have no address, and are one.
pub fn share_of_remote(remote: Option<IpAddr>) -> Share {
    remote.map_or_else(|| share(b"unix", &[]), share_of_address)
}

fn share(kind: &[u8], bytes: &[u8]) -> Share {
    let hash = Sha256::new().chain_update(kind).chain_update([0]).chain_update(bytes).finalize();
    let (first, _) = hash.split_first_chunk().expect("a hash has 32 bytes");
    u64::from_le_bytes(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_network_are_one_caller() {
        let of = |text: &str| share_of_address(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("192.0.2.1"), of("::ffff:192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
        assert_ne!(share_of_owner("a"), share_of_owner("b"));
    }
}
