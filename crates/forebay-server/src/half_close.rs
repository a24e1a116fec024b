//! Connections whose client has sent all that it wants to send.
//!
//! A client may close its side of a connection behind a request and still wait for the answer. A client that is gone looks the same,
//! until something is sent to it. So a client of HTTP/1.1 that closes its side before the answer begins gets an interim answer
//! (`100 Continue`), which every client ignores. If it is gone, its system resets the connection, which ends the request. Linux
//! reports this reset as the error of the socket. Reads still return the end of what the client sent.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::Version;
use futures_util::task::AtomicWaker;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::sockets::Connection;

const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// Time between two looks at whether the client is gone.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The request of a connection that is being answered.
#[derive(Default)]
pub struct Exchange {
    /// True while a request is answered for a client that may close its side first.
    is_open: AtomicBool,
    /// True if something of the answer was written.
    has_begun: AtomicBool,
    /// True if the client has closed its side.
    has_ended: AtomicBool,
    reader: AtomicWaker,
    body: AtomicWaker,
}

impl Exchange {
    /// Begins to answer a request. The request ends when the returned value is dropped.
    pub fn begin(self: &Arc<Exchange>, version: Version) -> Answering {
        self.has_begun.store(false, Ordering::Relaxed);
        // Older clients know no interim answers, so one that closes its side counts as gone.
        self.is_open.store(version == Version::HTTP_11, Ordering::Release);
        Answering(self.clone())
    }
}

/// A request that is being answered.
pub struct Answering(Arc<Exchange>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.is_open.store(false, Ordering::Release);
        self.0.reader.wake();
    }
}

/// A connection on which the end of what the client sends is not reported before its request is answered.
pub struct Patient {
    stream: Box<dyn Connection>,
    exchange: Arc<Exchange>,
    /// True if the interim answer was sent.
    was_asked: bool,
    look: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    pub fn new(stream: Box<dyn Connection>, exchange: Arc<Exchange>) -> Patient {
        Patient { stream, exchange, was_asked: false, look: None }
    }

    /// Asks the client for a sign of life. Returns an error if the connection is closed.
    fn ask(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.was_asked || self.exchange.has_begun.load(Ordering::Relaxed) {
            return Ok(());
        }
        match Pin::new(&mut self.stream).poll_write(context, INTERIM) {
            Poll::Ready(Ok(written)) if written < INTERIM.len() => {
                Err(io::Error::from(io::ErrorKind::WriteZero))
            }
            Poll::Ready(written) => {
                self.was_asked = true;
                written.map(drop)
            }
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let before = buffer.filled().len();
            // After the end, this returns nothing.
            ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
            if buffer.filled().len() > before || buffer.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            this.exchange.has_ended.store(true, Ordering::Release);
            this.exchange.body.wake();
            this.exchange.reader.register(context.waker());
            if !this.exchange.is_open.load(Ordering::Acquire) {
                return Poll::Ready(Ok(()));
            }
            this.ask(context)?;
            if let Some(error) = this.stream.take_error()? {
                return Poll::Ready(Err(error));
            }
            let look = this.look.get_or_insert_with(|| Box::pin(tokio::time::sleep(LOOK_EVERY)));
            ready!(look.as_mut().poll(context));
            this.look = None;
        }
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.exchange.has_begun.store(true, Ordering::Relaxed);
        Pin::new(&mut this.stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.exchange.has_begun.store(true, Ordering::Relaxed);
        Pin::new(&mut this.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// The body of a request. It is an error if the client closes its side before the end.
pub struct Received {
    body: Incoming,
    exchange: Arc<Exchange>,
}

impl Received {
    pub fn new(body: Incoming, exchange: Arc<Exchange>) -> Received {
        Received { body, exchange }
    }
}

impl HttpBody for Received {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        this.exchange.body.register(context.waker());
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(context) {
            return Poll::Ready(frame.map(|frame| frame.map_err(axum::Error::new)));
        }
        // The connection reads only what the body lacks, so there is nothing more after the end.
        match this.exchange.has_ended.load(Ordering::Acquire) {
            true => {
                let why = "the client closed the connection before its end";
                let error = io::Error::new(io::ErrorKind::UnexpectedEof, why);
                Poll::Ready(Some(Err(axum::Error::new(error))))
            }
            false => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer, at whose end the request is answered: then it drops what it keeps.
pub struct Answered<T> {
    body: Body,
    _kept: T,
}

impl<T> Answered<T> {
    pub fn new(body: Body, kept: T) -> Answered<T> {
        Answered { body, _kept: kept }
    }
}

impl<T: Unpin> HttpBody for Answered<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
