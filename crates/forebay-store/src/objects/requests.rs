//! How many requests run at a time, and a second request where an answer is late.
//!
//! A few answers of a store take many times longer than the others, and a load ends with its last one. So a request
//! whose answer is late is made once more, and the first answer counts. "The Tail at Scale" (Dean and Barroso, 2013)
//! calls that a hedged request. Late is what TCP calls so before it repeats a packet (RFC 6298).

use std::pin::pin;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::ObjectOptions;
use super::object::Trouble;

/// No answer is late before this.
const EARLIEST: Duration = Duration::from_millis(50);
/// Time between two looks at whether an answer is late. Other answers change what late is.
const LOOK: Duration = Duration::from_millis(20);
/// Second requests for each request, so that a store that is slow altogether gets little more work.
const HEDGES_PER_REQUEST: f64 = 0.1;
/// Most second requests that are saved up. As many are allowed at the start.
const HEDGES_SAVED: f64 = 8.0;

/// The requests for the objects of a set of files.
pub(super) struct Requests {
    connections: Semaphore,
    /// `None` without second requests.
    answers: Option<Mutex<Answers>>,
}

/// What is known of answers that came.
struct Answers {
    /// Mean of the times in seconds until they began, and mean of the differences from it. `None` before the first answer.
    times: Option<(f64, f64)>,
    /// Number of second requests that are allowed.
    allowed: f64,
}

/// The start of an answer. Its connection is in use until this is dropped.
pub(super) struct Answer<'a, T> {
    pub content: T,
    pub connection: SemaphorePermit<'a>,
}

impl Requests {
    pub fn new(options: ObjectOptions) -> Requests {
        let answers = Answers { times: None, allowed: HEDGES_SAVED };
        Requests {
            connections: Semaphore::new(options.connections),
            answers: options.hedge.then(|| Mutex::new(answers)),
        }
    }

    /// Makes a request as soon as a connection is free, and returns its answer when that begins. `request` makes one request
    /// each time it is called.
    pub async fn ask<T, F>(&self, request: impl Fn() -> F) -> Result<Answer<'_, T>, Trouble>
    where
        F: Future<Output = Result<T, Trouble>>,
    {
        let connection = self.connection().await;
        let started = Instant::now();
        let mut first = pin!(self.timed(request()));
        while !self.is_late(started.elapsed()) {
            if let Ok(answer) = timeout(LOOK, &mut first).await {
                return answer.map(|content| Answer { content, connection });
            }
        }
        let second = pin!(async {
            let connection = self.connection().await;
            let content = self.timed(request()).await?;
            Ok(Answer { content, connection })
        });
        match select(first, second).await {
            Either::Left((Ok(content), _)) => Ok(Answer { content, connection }),
            Either::Left((Err(Trouble::Passing(_)), second)) => {
                // The second request may wait for a connection.
                drop(connection);
                second.await
            }
            Either::Left((Err(trouble), _)) => Err(trouble),
            Either::Right((Err(Trouble::Passing(_)), first)) => {
                first.await.map(|content| Answer { content, connection })
            }
            Either::Right((answer, _)) => answer,
        }
    }

    async fn connection(&self) -> SemaphorePermit<'_> {
        self.connections.acquire().await.expect("nobody closes the semaphore")
    }

    /// Waits for an answer, and remembers how long it took.
    async fn timed<T>(
        &self,
        answer: impl Future<Output = Result<T, Trouble>>,
    ) -> Result<T, Trouble> {
        let started = Instant::now();
        let answer = answer.await;
        if let (Ok(_), Some(answers)) = (&answer, &self.answers) {
            let mut answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
            answers.add(started.elapsed().as_secs_f64());
        }
        answer
    }

    /// Returns true if a second request is to be made for one that has no answer after this time.
    fn is_late(&self, waited: Duration) -> bool {
        let Some(answers) = &self.answers else { return false };
        answers.lock().unwrap_or_else(PoisonError::into_inner).take_late(waited)
    }
}

impl Answers {
    fn add(&mut self, seconds: f64) {
        self.times = Some(match self.times {
            None => (seconds, seconds / 2.0),
            Some((mean, deviation)) => {
                let deviation = 0.75 * deviation + 0.25 * (mean - seconds).abs();
                (0.875 * mean + 0.125 * seconds, deviation)
            }
        });
        self.allowed = (self.allowed + HEDGES_PER_REQUEST).min(HEDGES_SAVED);
    }

    /// Returns true if this time is late and another request is allowed, which is counted.
    fn take_late(&mut self, waited: Duration) -> bool {
        let Some((mean, deviation)) = self.times else { return false };
        let late = (mean + 4.0 * deviation).max(EARLIEST.as_secs_f64());
        let is_late = waited.as_secs_f64() >= late && self.allowed >= 1.0;
        self.allowed -= f64::from(u8::from(is_late));
        is_late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_late_if_it_takes_longer_than_others_and_few_are_asked_again() {
        let mut answers = Answers { times: None, allowed: HEDGES_SAVED };
        let ms = Duration::from_millis;
        assert!(!answers.take_late(ms(60_000)), "nothing is known before the first answer");
        for index in 0..50 {
            answers.add(0.2 + 0.01 * f64::from(index % 3));
        }
        assert!(!answers.take_late(ms(215)));
        for _ in 0..HEDGES_SAVED as usize {
            assert!(answers.take_late(ms(400)));
        }
        assert!(!answers.take_late(ms(60_000)), "all that were allowed were used");
        for _ in 0..11 {
            answers.add(0.2);
        }
        assert!(answers.take_late(ms(400)));
        assert!(!answers.take_late(ms(400)));

        // A server nearby.
        let mut answers = Answers { times: None, allowed: HEDGES_SAVED };
        for _ in 0..50 {
            answers.add(0.001);
        }
        assert!(!answers.take_late(EARLIEST - ms(1)));
        assert!(answers.take_late(EARLIEST));
    }
}
