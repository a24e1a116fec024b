//! Connections: how many there are, whose they are, and what ends one that stands still.
//!
//! Idle connections give way to new ones, those of the address with the most connections first. A client that does not read its
//! answer loses its connection after a while, and so does one that does not send its request.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, watch};
use tokio::time::{Sleep, sleep};

use crate::caller::Share;

/// All open connections.
pub struct Connections {
    most: usize,
    state: Mutex<State>,
    /// Number of requests that are being answered.
    requests: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    /// Counts connections and ends of requests.
    clock: u64,
    open: HashMap<u64, Connection>,
}

struct Connection {
    address: Share,
    /// Requests that are being answered: one, unless a client sends the next one before it has the answer.
    requests: usize,
    /// When it was opened or its last request ended.
    idle_since: u64,
    end: Arc<Notify>,
}

/// The place of a connection among all. Dropping it frees the place.
pub struct Place {
    id: u64,
    connections: Arc<Connections>,
    end: Arc<Notify>,
}

/// A request that is being answered, until the last byte of its answer.
pub struct InWork(Arc<Place>);

impl Connections {
    /// Creates the places for `most` connections.
    pub fn new(most: usize) -> Arc<Connections> {
        let requests = watch::Sender::new(0);
        Arc::new(Connections { most, state: Mutex::default(), requests })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a new connection a place. If there is none, the idle connection of the address with the most connections that is
    /// idle for the longest time ends. Returns `None` if no connection is idle.
    pub fn admit(self: &Arc<Connections>, address: Share) -> Option<Arc<Place>> {
        let mut state = self.lock();
        if state.open.len() >= self.most {
            let idle = state.first_to_end()?;
            let ended = state.open.remove(&idle)?;
            // Its task may not wait yet, and then finds the note.
            ended.end.notify_one();
        }
        state.clock += 1;
        let (id, end) = (state.clock, Arc::new(Notify::new()));
        let connection = Connection { address, requests: 0, idle_since: id, end: end.clone() };
        state.open.insert(id, connection);
        Some(Arc::new(Place { id, connections: self.clone(), end }))
    }

    /// Waits until no request is being answered.
    pub async fn without_requests(&self) {
        // The sender lives as long as this.
        let _ = self.requests.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Returns the number of requests that are being answered.
    pub fn requests(&self) -> usize {
        *self.requests.borrow()
    }
}

impl State {
    /// Returns the connection that ends for a new one.
    fn first_to_end(&self) -> Option<u64> {
        let mut counts: HashMap<Share, usize> = HashMap::new();
        for connection in self.open.values() {
            *counts.entry(connection.address).or_default() += 1;
        }
        let idle = self.open.iter().filter(|(_, connection)| connection.requests == 0);
        let order =
            |(_, of): &(&u64, &Connection)| (std::cmp::Reverse(counts[&of.address]), of.idle_since);
        idle.min_by_key(order).map(|(id, _)| *id)
    }
}

impl Place {
    /// Waits until the connection has to end.
    pub async fn ended(&self) {
        self.end.notified().await;
    }

    /// Begins a request.
    pub fn request(self: &Arc<Place>) -> InWork {
        if let Some(connection) = self.connections.lock().open.get_mut(&self.id) {
            connection.requests += 1;
        }
        self.connections.requests.send_modify(|count| *count += 1);
        InWork(self.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.lock().open.remove(&self.id);
    }
}

impl Drop for InWork {
    fn drop(&mut self) {
        let Place { id, connections, .. } = &*self.0;
        let mut state = connections.lock();
        state.clock += 1;
        let clock = state.clock;
        if let Some(connection) = state.open.get_mut(id) {
            connection.requests -= 1;
            connection.idle_since = clock;
        }
        drop(state);
        connections.requests.send_modify(|count| *count -= 1);
    }
}

/// A connection that fails if the client takes nothing of what waits for it for a while.
pub struct Taken<S> {
    stream: S,
    limit: Duration,
    /// Runs while bytes wait for the client.
    waits: Option<Pin<Box<Sleep>>>,
}

impl<S> Taken<S> {
    /// Creates the connection.
    pub fn new(stream: S, limit: Duration) -> Taken<S> {
        Taken { stream, limit, waits: None }
    }

    /// Ends or begins to wait for the client.
    fn note<T>(
        &mut self,
        context: &mut Context<'_>,
        done: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.waits = None;
            return done;
        }
        let limit = self.limit;
        let waits = self.waits.get_or_insert_with(|| Box::pin(sleep(limit)));
        waits.as_mut().poll(context).map(|()| {
            Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read its answer"))
        })
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Taken<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, to)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Taken<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.note(context, done)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.note(context, done)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let done = Pin::new(&mut self.stream).poll_flush(context);
        self.note(context, done)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let done = Pin::new(&mut self.stream).poll_shutdown(context);
        self.note(context, done)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    fn open(connections: &Connections) -> Vec<Share> {
        let state = connections.lock();
        let mut open: Vec<Share> = state.open.values().map(|of| of.address).collect();
        open.sort_unstable();
        open
    }

    #[tokio::test]
    async fn idle_connections_of_the_greediest_address_give_way() {
        let connections = Connections::new(4);
        let other = connections.admit(2).unwrap();
        let greedy: Vec<_> = (0..3).map(|_| connections.admit(1).unwrap()).collect();
        let answered: Vec<InWork> = [&greedy[0], &other].map(Place::request).into();
        // The first of the greedy address is being answered, so its second one ends, although the other's is older.
        let third = connections.admit(3).unwrap();
        greedy[1].ended().await;
        assert_eq!(open(&connections), [1, 1, 2, 3]);
        drop(answered);
        // The other address is idle now, but has fewer connections.
        let fourth = connections.admit(4).unwrap();
        greedy[2].ended().await;
        assert_eq!(open(&connections), [1, 2, 3, 4]);
        let all: Vec<InWork> = [&greedy[0], &other, &third, &fourth].map(Place::request).into();
        assert!(connections.admit(5).is_none(), "nobody who is being answered gives way");
        drop(all);
        connections.without_requests().await;
        // What has ended already frees no place of others.
        drop(greedy);
        assert_eq!(open(&connections), [2, 3, 4]);
    }

    #[tokio::test]
    async fn a_client_that_takes_nothing_loses_its_connection() {
        let (near, far) = tokio::io::duplex(16);
        let mut near = Taken::new(near, Duration::from_millis(5));
        let error = near.write_all(&[0; 17]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(far);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_its_answer_slowly_keeps_its_connection() {
        let (near, mut far) = tokio::io::duplex(16);
        let mut near = Taken::new(near, Duration::from_secs(20));
        let reads = tokio::spawn(async move {
            for _ in 0..50 {
                sleep(Duration::from_secs(15)).await;
                let mut bytes = [0; 16];
                tokio::io::AsyncReadExt::read_exact(&mut far, &mut bytes).await.unwrap();
            }
        });
        near.write_all(&[0; 50 * 16]).await.unwrap();
        reads.await.unwrap();
    }
}
