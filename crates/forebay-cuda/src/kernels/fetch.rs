//! Experts that recorded work asks the host for, and copies from pinned memory by itself.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::launch::Launch;
use crate::{AddressTable, AddressTables, CudaError, DevicePtr, Gpu, HostWords, Pinned};

/// As in the kernel.
const THREADS: u32 = 512;
pub const CHOSEN_MAX: usize = 32;
const MISS_WORDS: usize = 10;
const RETURN_WORDS: usize = 16;
/// Of every question and every answer, so that none shares a line of a cache with another.
const LINE_WORDS: usize = 32;

/// What kernels of a token's run need to give up waiting for the host. Those of its kernels that come later then wait for nothing
/// and what they compute means nothing.
#[derive(Clone, Copy)]
pub struct GivingUp {
    /// How long a kernel waits.
    pub bound: Duration,
    /// `[1]`: the number of the last run that gave up, or 0.
    pub run: DevicePtr<u32>,
    /// The residual stream `[width]`, and where it is kept as it is when the run gives up.
    pub stream: DevicePtr<f32>,
    pub kept: DevicePtr<f32>,
    /// A multiple of 4.
    pub width: usize,
}

/// One token's experts of a layer, as a kernel fetches them.
#[derive(Clone, Copy)]
pub struct ExpertFetch {
    /// `[2]`: the number of the run, as [`ExpertMailbox::answer`] gets it, never 0 nor that of the run before; and 1 if `forced`
    /// are chosen, else 0.
    pub now: DevicePtr<u32>,
    /// `[k]` each.
    pub ids: DevicePtr<u32>,
    pub forced: DevicePtr<u32>,
    /// `[2]`, 0 before and after.
    pub tickets: DevicePtr<u32>,
    /// [`ExpertFetch::desk_words`] words, aligned to 16 bytes, the first of which is 0 before and after.
    pub desk: DevicePtr<u32>,
    /// The token's normed state `[hidden]`, if the mailbox takes it.
    pub x: DevicePtr<f32>,
    /// Blocks that copy.
    pub blocks: u32,
    /// `None`: kernels wait as long as it takes.
    pub giving_up: Option<GivingUp>,
}

impl ExpertFetch {
    /// Blocks that copy as fast as PCIe is.
    pub const BLOCKS: u32 = 16;

    /// Words in which one block tells the others what the host says, for `k` experts.
    pub fn desk_words(k: usize) -> usize {
        4 + answer_words(k).next_multiple_of(4)
    }
}

fn answer_words(k: usize) -> usize {
    4 + (4 + MISS_WORDS + RETURN_WORDS) * k
}

/// A layer whose experts are fetched.
#[derive(Clone, Copy)]
pub struct FetchedLayer {
    /// The number of its table in the mailbox's tables: addresses of the experts that are on the device and stay, 0 for the others.
    pub table: usize,
    /// The number of the table that gets the addresses of the chosen ones `[k]`, 0 where the answer says so.
    pub slots: usize,
    /// Where an expert's parts lie in its slot, each at a multiple of 16, and how many bytes they have.
    pub parts: [(u64, u64); 3],
}

/// Pinned words for questions and answers, a place for each layer; and where the host computes, too, for what goes there
/// and comes back. It owns the memory that experts go back to, of type `R`, until kernels have written it.
pub struct ExpertMailbox<R> {
    // Dropped first, and waits for the device then.
    words: HostWords,
    tables: Arc<AddressTables>,
    layers: Vec<FetchedLayer>,
    /// What goes back, in the order of answers.
    returning: VecDeque<ReturnUnderWay<R>>,
    /// The last question that tells how far the device is: its run and its place.
    seen: (u32, usize),
    k: usize,
    /// Words of a place: those of the question, then those of the answer, then one that says that rows are there.
    asked_words: usize,
    done_at: usize,
    place_words: usize,
    /// Values of the state that comes with a question, and of a row that goes back; 0: none do.
    hidden: usize,
    x_at: usize,
    /// Where a run that gives up says its number and the place.
    given_up_at: usize,
}

/// What a layer's kernel has said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertQuestion {
    /// All chosen experts are on the device: it has gone on.
    Resident,
    /// It waits for an answer.
    Waiting,
    /// An earlier kernel of the run has given up: see [`ExpertMailbox::given_up`].
    GivenUp,
}

/// What the device is told about a layer of a token's run.
#[derive(Clone, Copy)]
pub struct ExpertAnswer<'a> {
    /// Where the chosen experts will be `[k]`; null: somebody else computes with it.
    pub slots: &'a [DevicePtr<u8>],
    /// Numbers, in all tables, of experts that are not on the device any more, at most `2 * k`.
    pub gone: &'a [u32],
}

/// An expert that goes back to pinned memory.
pub struct ExpertReturn<R> {
    /// Its parts, at multiples of 16.
    pub from: [DevicePtr<u8>; 3],
    /// The memory that it goes to, and where its parts are there.
    pub to: R,
    pub ranges: [Range<usize>; 3],
}

struct ReturnUnderWay<R> {
    to: R,
    run: u32,
    place: usize,
    /// What had been queued when the answer was given.
    queued: u64,
}

/// An expert that has to be copied.
#[derive(Clone, Copy)]
pub struct ExpertMiss<'a> {
    /// Its number in the layer's table, if it stays.
    pub stays_as: Option<u32>,
    pub to: DevicePtr<u8>,
    /// Its parts in pinned memory, as long as the layer's are. They have to stay as they are until the kernel has run.
    pub from: [&'a [u8]; 3],
}

impl<R: AsMut<[u8]> + Send + 'static> ExpertMailbox<R> {
    /// For `layers`, whose tokens choose `k` experts, at most 32. The host computes some of them from states of
    /// `hidden` values, unless that is 0.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When parts are not aligned to 16 bytes or do not lie in their slots.
    pub fn new(
        gpu: &Gpu,
        tables: Arc<AddressTables>,
        layers: Vec<FetchedLayer>,
        k: usize,
        hidden: usize,
    ) -> Result<ExpertMailbox<R>, CudaError> {
        assert!((1..=CHOSEN_MAX).contains(&k), "a token chooses {k} experts");
        assert!(hidden.is_multiple_of(4), "16 bytes are copied at once");
        for layer in &layers {
            let (table, slots) = (tables.table(layer.table), tables.table(layer.slots));
            assert!(slots.len() >= k && slots.slot_bytes() <= table.slot_bytes(), "chosen slots");
            let is_right = |(at, bytes): &(u64, u64)| {
                at.is_multiple_of(16) && at + bytes <= table.slot_bytes() && *bytes < 1 << 31
            };
            assert!(layer.parts.iter().all(is_right), "parts {:?} of a slot", layer.parts);
        }
        let places = layers.len();
        let asked_words = (4 + k).next_multiple_of(LINE_WORDS);
        let done_at = asked_words + answer_words(k).next_multiple_of(LINE_WORDS);
        let place_words = done_at + LINE_WORDS;
        let x_at = places * place_words;
        let given_up_at = (x_at + (1 + k) * hidden).next_multiple_of(LINE_WORDS);
        let words = gpu.host_words(given_up_at + LINE_WORDS)?;
        Ok(ExpertMailbox {
            words,
            tables,
            layers,
            returning: VecDeque::with_capacity(2 * k),
            seen: (0, 0),
            k,
            asked_words,
            done_at,
            place_words,
            hidden,
            x_at,
            given_up_at,
        })
    }

    /// Where the kernel of a place puts the addresses of the chosen experts.
    pub fn slots(&self, place: usize) -> AddressTable {
        self.tables.table(self.layers[place].slots)
    }

    /// Gives memory that experts went back to and that kernels have written: theirs have run if a later question of the run
    /// or a later run's has come, or `gpu` was waited for since the answer.
    pub fn returned(&mut self, gpu: &Gpu) -> Option<R> {
        let first = self.returning.front()?;
        let is_behind = if first.run == self.seen.0 { first.place < self.seen.1 } else { false };
        if !is_behind && first.queued > gpu.finished() {
            return None;
        }
        let first = self.returning.pop_front()?;
        // A kernel that is queued for this answer only now finds none.
        let at = first.place * self.place_words + self.asked_words;
        if self.words.load_acquire(at) == first.run {
            self.words.store_release(at, 0);
        }
        Some(first.to)
    }

    /// Copies the state `[hidden]` that came with the last question that waits.
    ///
    /// # Panics
    /// When `x` is not of that size.
    pub fn read_state(&self, x: &mut [f32]) {
        assert_eq!(x.len(), self.hidden);
        self.words.read(self.x_at, x);
    }

    /// Puts a row of outputs where [`Gpu::take_rows`] finds it: that of the chosen expert number `pair`. Those of the layer
    /// before must have been taken.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn write_row(&mut self, pair: usize, row: &[f32]) {
        assert!(pair < self.k && row.len() == self.hidden);
        self.words.write(self.x_at + (1 + pair) * self.hidden, row);
    }

    /// Says that the rows of run `run` are there.
    pub fn rows_are_there(&mut self, place: usize, run: u32) {
        self.words.store_release(place * self.place_words + self.done_at, run);
    }

    /// The place where run `run` has given up, if it has. Certain once its work has ended.
    pub fn given_up(&self, run: u32) -> Option<usize> {
        if self.words.load_acquire(self.given_up_at) != run {
            return None;
        }
        let mut place = [0_u32];
        self.words.read(self.given_up_at + 1, &mut place);
        Some(place[0] as usize)
    }

    /// Forgets that a run has given up, for it to go on. Nothing of it may be queued.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn forget_given_up(&mut self, gpu: &Gpu, of: &GivingUp) -> Result<(), CudaError> {
        self.words.store_release(self.given_up_at, 0);
        gpu.fill(of.run.cast(), 0, size_of::<u32>())
    }

    /// Queues a copy of the state `[hidden]` to where [`ExpertMailbox::read_state`] finds it.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn queue_state(&self, gpu: &Gpu, x: DevicePtr<f32>) -> Result<(), CudaError> {
        gpu.queue_download(x.cast(), &self.words, self.x_at..self.x_at + self.hidden)
    }

    /// The ids that the token of run `run` has chosen in a layer, if they have come, and what is wanted.
    ///
    /// # Panics
    /// When `ids` is not for `k`.
    pub fn question(&mut self, place: usize, run: u32, ids: &mut [u32]) -> Option<ExpertQuestion> {
        assert_eq!(ids.len(), self.k);
        let at = place * self.place_words;
        if self.words.load_acquire(at) != run {
            return None;
        }
        let mut wanted = [0_u32];
        self.words.read(at + 1, &mut wanted);
        self.words.read(at + 2, ids);
        let question = match wanted[0] {
            0 => ExpertQuestion::Resident,
            1 => ExpertQuestion::Waiting,
            _ => return Some(ExpertQuestion::GivenUp),
        };
        self.seen = (run, place);
        Some(question)
    }

    /// Nanoseconds that a layer waited for its answer, and that it copied, once what follows it has run.
    pub fn times(&self, place: usize) -> [u32; 2] {
        let mut times = [0; 2];
        self.words.read(place * self.place_words + 2 + self.k, &mut times);
        times
    }

    /// Answers the question of run `run`, once. At most `k` experts go back; [`ExpertMailbox::returned`] gives their memory.
    ///
    /// # Panics
    /// With more than there can be, addresses that are not of whole slots, numbers that are not in the tables, and memory that is not
    /// of `pinned` or not as long as the parts.
    #[allow(clippy::too_many_arguments, reason = "an answer and what proves it, each once")]
    pub fn answer<'m>(
        &mut self,
        gpu: &Gpu,
        place: usize,
        run: u32,
        answer: &ExpertAnswer<'_>,
        misses: impl Iterator<Item = &'m ExpertMiss<'m>>,
        returns: impl ExactSizeIterator<Item = ExpertReturn<R>>,
        pinned: &Pinned,
    ) {
        let (k, ExpertAnswer { slots, gone }) = (self.k, *answer);
        let (returned, mut missed) = (returns.len(), 0);
        assert!(slots.len() == k && gone.len() <= 2 * k && returned <= k, "more than was chosen");
        let FetchedLayer { table, parts, .. } = self.layers[place];
        let table = self.tables.table(table);
        let (all, first) = (self.tables.all().len(), table.number());
        assert!(gone.iter().all(|&number| (number as usize) < all), "numbers of no entries");
        slots.iter().for_each(|slot| self.tables.check(&table, slot.address()));
        let at = place * self.place_words + self.asked_words;
        let words = &mut self.words;
        for (i, slot) in slots.iter().enumerate() {
            words.write(at + 4 + 2 * i, &[slot.address()]);
        }
        let first_miss = at + 4 + 2 * k;
        for miss in misses {
            assert!(missed < k, "more than was chosen");
            let at = first_miss + MISS_WORDS * missed;
            missed += 1;
            assert!(miss.stays_as.is_none_or(|expert| (expert as usize) < table.len()));
            self.tables.check(&table, miss.to.address());
            assert!(!miss.to.is_null(), "an expert goes nowhere");
            let is_whole = |(from, part): (&&[u8], &(u64, u64))| from.len() as u64 == part.1;
            assert!(miss.from.iter().zip(&parts).all(is_whole), "parts of other lengths");
            let stays_as = miss.stays_as.map_or(u32::MAX, |expert| first as u32 + expert);
            words.write(at, &[stays_as, 0]);
            words.write(at + 2, &[miss.to.address()]);
            words.write(at + 4, &miss.from.map(|from| pinned.device_address(from)));
        }
        words.write(first_miss + MISS_WORDS * k, gone);
        let first_return = first_miss + (MISS_WORDS + 2) * k;
        for (i, back) in returns.enumerate().take(k) {
            let ExpertReturn { from, mut to, ranges } = back;
            let at = first_return + RETURN_WORDS * i;
            let bytes = ranges.clone().map(|range| range.len());
            from.iter().zip(bytes).for_each(|(from, bytes)| from.check(bytes));
            words.write(at, &from.map(|part| part.address()));
            let memory = to.as_mut();
            let first = memory.as_ptr();
            words.write(at + 6, &ranges.map(|range| pinned.device_address(&memory[range])));
            words.write(at + 12, &bytes.map(|bytes| bytes as u32));
            // Nobody else has it until it comes back, and moving it must not move its bytes.
            self.returning.push_back(ReturnUnderWay { to, run, place, queued: gpu.queued() });
            let last = self.returning.back_mut().map(|last| last.to.as_mut().as_ptr());
            assert_eq!(last, Some(first), "memory that an expert goes back to has moved");
        }
        words.write(at + 1, &[missed as u32, gone.len() as u32, returned as u32]);
        words.store_release(at, run);
    }
}

impl Gpu {
    /// Queues a kernel that asks the host, through place `place` of the mailbox, for the experts that are not on the device, waits
    /// for the answer and copies them. [`ExpertMailbox::answer`] must come before, or follow each time it runs and waits.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small.
    pub fn fetch_experts<R: AsMut<[u8]> + Send + 'static>(
        &self,
        fetch: &ExpertFetch,
        mailbox: &ExpertMailbox<R>,
        place: usize,
    ) -> Result<(), CudaError> {
        let ExpertMailbox { k, tables, .. } = mailbox;
        let FetchedLayer { table, slots, parts } = mailbox.layers[place];
        let table = tables.table(table);
        assert!(fetch.blocks >= 2, "some copy in, some out");
        let asked = mailbox.words.device(place * mailbox.place_words);
        let (x, x_host) = match mailbox.hidden {
            0 => (DevicePtr::null(), DevicePtr::null()),
            _ => (fetch.x, mailbox.words.device(mailbox.x_at)),
        };
        let [one, two, three] = parts;
        let hidden = if fetch.x.is_null() { 0 } else { mailbox.hidden };
        let asked_words = 4 + k;
        Launch::new(self.kernel("fetch", "fetch_experts")?, (fetch.blocks, 1, 1), (THREADS, 1, 1))
            .ptr(fetch.now, 2)
            .optional(fetch.ids, *k)
            .ptr(fetch.forced, *k)
            .int(*k)
            .ptr(tables.all(), table.number() + table.len())
            .int(table.number())
            .ptr(tables.table(slots).first(), *k)
            .ptr(fetch.tickets, 2)
            .ptr(fetch.desk, ExpertFetch::desk_words(*k))
            .ptr(asked, asked_words)
            .ptr(asked.offset(mailbox.asked_words), answer_words(*k))
            .optional(x, hidden)
            .optional(x_host, hidden)
            .int(mailbox.hidden)
            .u64(one.0)
            .u64(two.0)
            .u64(three.0)
            .int(one.1 as usize)
            .int(two.1 as usize)
            .int(three.1 as usize)
            .giving_up(fetch, &mailbox.words, mailbox.given_up_at, place)
            .run(self)
    }

    /// Queues a kernel that brings rows of outputs which the host computes to `out [k, hidden]`: those of the chosen experts
    /// whose slot is null. [`ExpertMailbox::rows_are_there`] must follow each time it runs and there are such.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small.
    pub fn take_rows<R: AsMut<[u8]> + Send + 'static>(
        &self,
        fetch: &ExpertFetch,
        mailbox: &ExpertMailbox<R>,
        place: usize,
        out: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        let words = &mailbox.words;
        let (k, hidden) = (mailbox.k, mailbox.hidden);
        Launch::new(self.kernel("fetch", "take_rows")?, (k as u32, 1, 1), (256, 1, 1))
            .ptr(fetch.now, 2)
            .ptr(mailbox.slots(place).first(), k)
            .ptr(words.device(place * mailbox.place_words + mailbox.done_at), 1)
            .ptr(words.device(mailbox.x_at + hidden), k * hidden)
            .ptr(out, k * hidden)
            .int(hidden)
            .giving_up(fetch, words, mailbox.given_up_at, place)
            .run(self)
    }
}

impl Launch {
    /// The arguments that both kernels end with.
    fn giving_up(self, fetch: &ExpertFetch, words: &HostWords, at: usize, place: usize) -> Launch {
        let none = GivingUp {
            bound: Duration::ZERO,
            run: DevicePtr::null(),
            stream: DevicePtr::null(),
            kept: DevicePtr::null(),
            width: 0,
        };
        let GivingUp { bound, run, stream, kept, width } = fetch.giving_up.unwrap_or(none);
        assert!(width.is_multiple_of(4), "16 bytes are copied at once");
        // 0 stands for no bound.
        let least = u32::from(fetch.giving_up.is_some());
        let nanoseconds = u32::try_from(bound.as_nanos()).unwrap_or(u32::MAX).max(least);
        self.u64(nanoseconds.into())
            .int(place)
            .optional(stream, width)
            .optional(kept, width)
            .int(width)
            .optional(run, 1)
            .ptr(words.device(at), 2)
    }
}
