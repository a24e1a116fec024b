//! A client that asks a running server, for commands such as `forebay ps`.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::runtime::Builder;

/// Time for an answer. Lists need no model, so a server answers at once.
const ANSWER_TIME: Duration = Duration::from_secs(20);
/// Most bytes of an answer.
const ANSWER_BYTES: usize = 16 << 20;
/// Port of a server whose address has none.
const PORT: u16 = 8080;

/// Reason why a server was not asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    #[error("{server}: write the server as http://HOST:PORT: {why}")]
    Address { server: String, why: &'static str },
    #[error("no server answers at {server}: {why}: is forebay serve running there?")]
    Unreachable { server: String, why: String },
    #[error("{server} answers with status {status}: {message}")]
    Refused { server: String, status: u16, message: String },
    #[error("{server} does not answer in JSON, so it is no forebay server")]
    Other { server: String },
}

/// Returns the host and the port in `http://HOST:PORT`, of which only the host is needed.
fn address(server: &str) -> Result<(&str, u16), AskError> {
    let wrong = |why| AskError::Address { server: server.to_owned(), why };
    let rest = match server.split_once("://") {
        None => server,
        Some(("http", rest)) => rest,
        Some(_) => return Err(wrong("only http is supported")),
    };
    let rest = rest.trim_end_matches('/');
    if rest.is_empty() || rest.contains(['/', '@', '?', '#', ' ']) {
        return Err(wrong("there is no host, or more than a host and a port"));
    }
    // An address of IPv6 is in brackets, which a socket does not want.
    let (host, port) = match rest.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(|| wrong("a bracket is missing"))?;
            (host, port.strip_prefix(':').or(port.is_empty().then_some("")))
        }
        None => match rest.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (rest, Some("")),
        },
    };
    match port {
        Some("") => Ok((host, PORT)),
        Some(port) => {
            Ok((host, port.parse().map_err(|_| wrong("the port is no number up to 65535"))?))
        }
        None => Err(wrong("the port is no number up to 65535")),
    }
}

/// Asks a server for the JSON at `path`.
///
/// # Errors
/// Returns why there is no answer.
pub fn get(server: &str, path: &str, key: Option<&str>) -> Result<Value, AskError> {
    let (host, port) = address(server)?;
    let unreachable = |why: String| AskError::Unreachable { server: format!("{host}:{port}"), why };
    let runtime = Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|error| unreachable(error.to_string()))?;
    let answer = runtime.block_on(async {
        let asked = tokio::time::timeout(ANSWER_TIME, ask((host, port), path, key));
        asked.await.unwrap_or_else(|_| Err("it takes too long".to_owned()))
    });
    let (status, body) = answer.map_err(unreachable)?;
    let server = format!("{host}:{port}");
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return Err(AskError::Other { server });
    };
    if status != StatusCode::OK {
        let message = body["error"].as_str().or_else(|| body["error"]["message"].as_str());
        let message = message.unwrap_or("no reason").to_owned();
        return Err(AskError::Refused { server, status: status.as_u16(), message });
    }
    Ok(body)
}

async fn ask(
    (host, port): (&str, u16),
    path: &str,
    key: Option<&str>,
) -> Result<(StatusCode, Vec<u8>), String> {
    let words = |error: &dyn std::error::Error| error.to_string();
    let stream = TcpStream::connect((host, port)).await.map_err(|error| words(&error))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| words(&error))?;
    let connection = tokio::spawn(connection);
    let name =
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let mut request = Request::get(path).header(header::HOST, name);
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let request = request.body(Body::empty()).map_err(|error| words(&error))?;
    let response = sender.send_request(request).await.map_err(|error| words(&error))?;
    let (head, body) = response.into_parts();
    let body = to_bytes(Body::new(body), ANSWER_BYTES).await.map_err(|error| words(&error))?;
    connection.abort();
    Ok((head.status, body.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_as_people_write_them() {
        for (server, host, port) in [
            ("127.0.0.1:9000", "127.0.0.1", 9000),
            ("http://localhost:8080/", "localhost", 8080),
            ("gpu", "gpu", 8080),
            ("[::1]:11434", "::1", 11434),
            ("http://[::1]", "::1", 8080),
        ] {
            assert_eq!(address(server).unwrap(), (host, port), "{server}");
        }
        for wrong in
            ["", "https://gpu", "http://", "gpu:x", "gpu:99999", "[::1", "[::1]x", "a/b", "k@gpu"]
        {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }
}
