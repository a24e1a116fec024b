//! One request of a session: its answer continues the session's own sequence.

use std::ops::{ControlFlow, Deref, DerefMut};
use std::time::Instant;

use forebay_model::ModelError;
use forebay_stream::Phase;
use tracing::field::Empty;

use super::active::Active;
use super::request::{Request, RequestEnd, RequestId};
use super::schedule::Part;
use super::waiting::Submitted;
use super::{Engine, EngineOptions};
use crate::{EngineError, GenerateOptions, Generation, Session, StopReason};

/// A session that an engine has, or that has lent itself to one for an answer.
pub enum Held<'s> {
    Own(Box<Session>),
    Lent(&'s mut Session),
}

impl Deref for Held<'_> {
    type Target = Session;

    fn deref(&self) -> &Session {
        match self {
            Held::Own(session) => session,
            Held::Lent(session) => session,
        }
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Session {
        match self {
            Held::Own(session) => session,
            Held::Lent(session) => session,
        }
    }
}

/// Request of a session to an engine.
pub(crate) struct Asked<'a> {
    pub prompt: &'a [u32],
    pub options: &'a GenerateOptions,
    /// Tokens that come instead of the first chosen ones, for measurements.
    pub instead: &'a [u32],
}

impl Session {
    /// Appends `prompt` to the cached tokens, then generates. `on_token` gets every new id as soon as it is chosen and
    /// may stop the generation.
    ///
    /// If the session is interrupted, this returns the tokens so far with [`StopReason::Interrupted`]. The cache then
    /// holds nothing of an unfinished prompt, and every token that was fed before the interrupt.
    /// [`Session::cached_tokens`] returns them.
    ///
    /// # Errors
    /// Returns an error if the prompt is empty, if it does not fit the context, or if a read fails.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generation, EngineError> {
        let asked = Asked { prompt, options, instead: &[] };
        self.generate_timed(&asked, on_token).map(|(generation, _)| generation)
    }

    /// Generates like [`Session::generate`]. Also returns the seconds for which the generated tokens waited for weights.
    pub(crate) fn generate_timed(
        &mut self,
        asked: &Asked<'_>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<(Generation, f64), EngineError> {
        let prompt = asked.prompt;
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let (used, context) = (self.cached.len(), self.context());
        if used + prompt.len() > context {
            return Err(ModelError::ContextFull { used, context, wanted: prompt.len() }.into());
        }
        self.begin_turn(prompt)?;
        let options_of_one = EngineOptions { running: Some(1), ..EngineOptions::default() };
        let mut engine = Engine::of(Held::Lent(self), &options_of_one);
        let answered = engine.answer(asked, on_token);
        let given_back = engine.give_back(used);
        let answered = answered?;
        given_back.map(|()| answered)
    }
}

impl Engine<'_> {
    /// Returns true if the only request is one of the session itself.
    pub(super) fn is_lent(&self) -> bool {
        matches!(self.session, Held::Lent(_))
    }

    /// Returns the next position within the prompt at which the state of recurrent layers is to be kept, if there is one.
    pub(super) fn state_border(&self, active: &Active) -> Option<usize> {
        let keeps = !self.is_lent() || self.session.keeps_states;
        active.state_border(&self.session.runner).filter(|_| keeps)
    }

    /// Answers a prompt behind the tokens that the session has.
    fn answer(
        &mut self,
        &Asked { prompt, options, instead }: &Asked<'_>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<(Generation, f64), EngineError> {
        let started = Instant::now();
        let session = &mut *self.session;
        let cached = session.cached.len();
        let all = [&session.cached[..], prompt].concat();
        let request = Request { prompt: all, options: options.clone(), ..Request::default() };
        let sink = Box::new(|_| ControlFlow::Continue(()));
        let new = Submitted::new(request, sink);
        let mut active = Active::new(RequestId(0), new, (session.sequence, cached), session);
        // A prompt is read, too, if no token is wanted.
        active.end = None;
        active.instead = instead.to_vec().into();
        self.running.push(active);

        let mut generation = Generation {
            tokens: Vec::new(),
            stop_reason: StopReason::Interrupted,
            prompt_tokens: prompt.len(),
            prompt_seconds: 0.0,
            generate_seconds: 0.0,
        };
        let span = tracing::debug_span!("prompt", tokens = prompt.len(), cached);
        let read = span.in_scope(|| {
            while self.running[0].reads() {
                self.step_of_running()?;
            }
            Ok(())
        });
        drop(span);
        generation.prompt_seconds = started.elapsed().as_secs_f64();
        match read {
            Ok(()) => self.session.runner.decoder.end_prompt(prompt.len()),
            Err(EngineError::Interrupted) => return Ok((generation, 0.0)),
            Err(error) => return Err(error),
        }
        let (generating, waited) = (Instant::now(), self.session.wait_seconds());
        let span = tracing::debug_span!("generate", tokens = Empty, end = Empty).entered();
        generation.stop_reason = self.generate(&mut generation.tokens, on_token)?;
        span.record("tokens", generation.tokens.len());
        span.record("end", tracing::field::debug(generation.stop_reason));
        generation.generate_seconds = generating.elapsed().as_secs_f64();
        Ok((generation, self.session.wait_seconds() - waited))
    }

    /// Generates until the answer ends. Each token is told of before the next one is computed.
    fn generate(
        &mut self,
        tokens: &mut Vec<u32>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<StopReason, EngineError> {
        loop {
            let active = &self.running[0];
            if let Some(&id) = active.tokens().get(active.prompt_len() + tokens.len()) {
                tokens.push(id);
                if on_token(id).is_break() {
                    return Ok(StopReason::Stopped);
                }
            }
            match self.running[0].end.take() {
                None => {}
                Some(RequestEnd::End) => return Ok(StopReason::End),
                Some(RequestEnd::MaxTokens) => return Ok(StopReason::MaxTokens),
                Some(RequestEnd::ContextFull) => return Ok(StopReason::ContextFull),
                Some(_) => return Err(EngineError::NoChoice),
            }
            match self.step_of_running() {
                Ok(()) => {}
                Err(EngineError::Interrupted) => return Ok(StopReason::Interrupted),
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives the session its sequence back, which had so many tokens before.
    fn give_back(&mut self, before: usize) -> Result<(), EngineError> {
        let active = self.running.remove(0);
        let is_read = !active.reads();
        let session = &mut *self.session;
        if !self.proposes {
            session.cached.clear();
            session.cached.extend_from_slice(&active.tokens()[..active.done()]);
        }
        if !is_read {
            session.truncate(before);
        }
        if let Some(log) = &mut session.routing {
            log.forget();
        }
        match session.settle() {
            Err(EngineError::Interrupted) => Ok(()),
            settled => settled,
        }
    }

    /// Runs the parts in one pass. A session that has lent itself records the routing, and is told how far its prompt is.
    pub(super) fn run_pass(&mut self, parts: &[Part]) -> Result<(), EngineError> {
        let ([part], true) = (parts, self.is_lent()) else {
            return self.run_with_logits(parts, |runner, rows, output| {
                runner.pass(rows, output, None, None)
            });
        };
        let (mut log, mut watch) = (self.session.routing.take(), self.session.watch.take());
        let (done, total) = self.running[part.index].prompt_progress();
        let mut told = watch.as_mut().filter(|_| part.reads && total > 1).map(|watch| {
            move |layers: usize, all: usize| watch(done + part.count * layers / all, total)
        });
        let ran = self.run_with_logits(parts, |runner, rows, output| {
            let told = told.as_mut().map(|told| told as &mut dyn FnMut(usize, usize));
            runner.pass(rows, output, log.as_mut().map(|log| log.rows()), told)
        });
        (self.session.routing, self.session.watch) = (log, watch);
        ran?;
        // The rows of a prompt are recorded together, once it is read.
        let phase = match part.reads {
            true if done + part.count < total => return Ok(()),
            true => Phase::Prompt,
            false => Phase::Generate,
        };
        let batch_tokens = self.session.runner.decoder.backend().batch_tokens();
        match &mut self.session.routing {
            Some(log) => Ok(log.write(phase, batch_tokens)?),
            None => Ok(()),
        }
    }
}
