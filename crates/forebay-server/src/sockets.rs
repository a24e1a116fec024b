//! Where the server listens: an address, or a path of a Unix socket.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::PathBuf;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream};

/// Most bytes that wait for a client in the program, and about as many in the system.
pub const BUFFER_BYTES: usize = 256 << 10;
/// New connections that wait until they are accepted.
const BACKLOG: u32 = 1024;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    /// Path of a Unix socket, which is made and removed.
    Unix(PathBuf),
}

impl Address {
    /// Returns the address as clients write it.
    pub fn url(&self) -> String {
        match self {
            Address::Tcp(address) => format!("http://{address}"),
            Address::Unix(path) => format!("unix:{}", path.display()),
        }
    }

    /// Returns true if only programs of this machine can connect.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Tcp(address) => address.ip().is_loopback(),
            Address::Unix(_) => true,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(path) => path.display().fmt(f),
        }
    }
}

/// A connection of a client.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {
    /// Writes as much as the system takes at once. Returns its number of bytes.
    ///
    /// # Errors
    /// Returns an error of the system.
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize>;

    /// Takes the error that the system has noted for the connection, if there is one.
    ///
    /// # Errors
    /// Returns an error if the system cannot be asked.
    fn take_error(&self) -> io::Result<Option<io::Error>>;
}

impl Connection for TcpStream {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        TcpStream::try_write(self, bytes)
    }

    fn take_error(&self) -> io::Result<Option<io::Error>> {
        TcpStream::take_error(self)
    }
}

impl Connection for UnixStream {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        UnixStream::try_write(self, bytes)
    }

    fn take_error(&self) -> io::Result<Option<io::Error>> {
        UnixStream::take_error(self)
    }
}

/// A socket that clients connect to.
pub enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Socket {
    /// Takes the address. A Unix socket that an ended program has left is replaced.
    ///
    /// # Errors
    /// Returns an error if another program has the address, or if the path cannot be made.
    pub async fn bind(address: &Address) -> io::Result<Socket> {
        match address {
            Address::Tcp(address) => Ok(Socket::Tcp(listen_at(*address)?)),
            Address::Unix(path) => {
                // Only a socket refuses a connection like this.
                let tried = BlockingStream::connect(path);
                if tried.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
                    std::fs::remove_file(path)?;
                }
                Ok(Socket::Unix(UnixListener::bind(path)?, path.clone()))
            }
        }
    }

    /// Returns the address, with the port that the system chose if it was 0.
    ///
    /// # Errors
    /// Returns an error of the system.
    pub fn address(&self) -> io::Result<Address> {
        match self {
            Socket::Tcp(listener) => listener.local_addr().map(Address::Tcp),
            Socket::Unix(_, path) => Ok(Address::Unix(path.clone())),
        }
    }

    /// Waits for a connection. Returns it with the address of the client, if it has one.
    ///
    /// # Errors
    /// Returns an error if the system has no descriptor or memory left for a connection.
    pub async fn accept(&self) -> io::Result<(Box<dyn Connection>, Option<SocketAddr>)> {
        match self {
            Socket::Tcp(listener) => {
                let (stream, remote) = listener.accept().await?;
                // Tokens are small, and each should arrive at once.
                let _ = stream.set_nodelay(true);
                Ok((Box::new(stream), Some(remote)))
            }
            Socket::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                Ok((Box::new(stream), None))
            }
        }
    }
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    // Connections inherit it.
    socket.set_send_buffer_size(BUFFER_BYTES as u32)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Socket::Unix(_, path) = self {
            // The path may be gone already.
            let _ = std::fs::remove_file(path);
        }
    }
}
