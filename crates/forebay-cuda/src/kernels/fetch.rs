//! Experts that a CUDA graph requests from the host and copies from pinned memory by itself.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::launch::Launch;
use crate::{
    AddressTable, AddressTables, CudaError, DevicePtr, Gpu, HostWords, Pinned, SideStream,
};

/// Number of threads of a block; the same as in the kernel.
const THREADS: u32 = 512;
/// Maximum number of pairs of a row and an expert that one kernel fetches. The answer for more does not fit the shared
/// memory that every GPU gives a block.
pub const FETCHED_PAIRS_MAX: usize = 384;
const MISS_WORDS: usize = 10;
/// State of a question that `find_experts` has sent.
const EARLY: u32 = 3;
const RETURN_WORDS: usize = 16;
/// Alignment of every question and every answer, so that no two of them share a cache line.
const LINE_WORDS: usize = 32;

/// Arguments with which the kernels of a token's run give up waiting for the host. After that, later kernels of the
/// run do not wait, and their results are meaningless.
#[derive(Clone, Copy)]
pub struct GivingUp {
    /// Longest time that a kernel waits.
    pub bound: Duration,
    /// One word: the number of the last run that gave up, or 0.
    pub run: DevicePtr<u32>,
    /// The residual stream `[width]` of all rows, and a buffer that gets a copy of it when the run gives up.
    pub stream: DevicePtr<f32>,
    pub kept: DevicePtr<f32>,
    /// Number of elements of the stream, a multiple of 4.
    pub width: usize,
}

/// Arguments of a kernel that fetches the experts of a layer for `k` pairs of a row and an expert.
#[derive(Clone, Copy)]
pub struct ExpertFetch {
    /// Two words. The first is the number of the run, as passed to [`ExpertMailbox::answer`]; it is never 0 nor the
    /// number of the previous run. The second is 1 if `forced` are chosen, otherwise 0.
    pub now: DevicePtr<u32>,
    /// Number of pairs.
    pub k: usize,
    /// Number of experts that may come, and that may go back, at least `k`. Twice as many may leave.
    pub room: usize,
    /// True if the kernel takes an answer even if all chosen experts are on the device.
    pub always: bool,
    /// Ids `[k]` of the experts that the router chose; `forced` has the same size and may replace them.
    pub ids: DevicePtr<u32>,
    pub forced: DevicePtr<u32>,
    /// Two words, 0 before and after.
    pub tickets: DevicePtr<u32>,
    /// Buffer of [`ExpertFetch::desk_words`] words, aligned to 16 bytes. The first word is 0 before and after.
    pub desk: DevicePtr<u32>,
    /// The normed state `[hidden]` of a single row, if the mailbox takes it.
    pub x: DevicePtr<f32>,
    /// Number of blocks that copy.
    pub blocks: u32,
    /// `None` if kernels wait without a limit.
    pub giving_up: Option<GivingUp>,
}

impl ExpertFetch {
    /// Number of blocks that copy at the full rate of PCIe.
    pub const BLOCKS: u32 = 16;

    /// Returns the number of words in which one block passes the host's answer to the other blocks, for `k` pairs.
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
    /// Index of its table in the mailbox's tables. The table holds addresses of the experts that stay on the device,
    /// and 0 for the others.
    pub table: usize,
    /// Index of the table of the same length that gets the addresses of the chosen experts. An address is 0 where the
    /// answer says so. If a side stream fetches, the table names only the experts that it fetches.
    pub slots: usize,
    /// Index of the table of the same length that gets the addresses of the chosen experts that are on the device before
    /// a side stream fetches the others.
    pub present: usize,
    /// Offset of each part of an expert in its slot, a multiple of 16, and its length in bytes.
    pub parts: [(u64, u64); 3],
}

/// Pinned words for questions and answers, with one place for each part of a pass in each layer, in the order in which
/// kernels ask. If the host computes experts, they also hold the state that goes to the host and the rows that come back.
/// The mailbox owns the memory of type `R` that evicted experts go back to, until kernels have written it.
pub struct ExpertMailbox<R> {
    // Declared first, so that it is dropped first; its drop waits for the device.
    words: HostWords,
    tables: Arc<AddressTables>,
    layers: Vec<FetchedLayer>,
    /// Memory that experts go back to, in the order of answers.
    returning: VecDeque<ReturnUnderWay<R>>,
    /// Run and place of the last question, which tell how far the device is.
    seen: (u32, usize),
    /// Maximum number of pairs of a question.
    pairs_max: usize,
    /// Offsets and size within a place: the question, then the answer, then a word that says that rows are there.
    asked_words: usize,
    done_at: usize,
    place_words: usize,
    /// Number of values of the state that comes with a question, and of each row that goes back; 0 if there are none.
    hidden: usize,
    x_at: usize,
    /// Offset of the words to which a run that gives up writes its number and the place.
    given_up_at: usize,
}

/// State of a layer's kernel, as it reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertQuestion {
    /// All chosen experts are on the device, and the kernel has gone on.
    Resident,
    /// The kernel waits for an answer.
    Waiting,
    /// The kernel has not run yet. It will wait for an answer unless all chosen experts are on the device by then.
    /// Kernels of the places before the last have run.
    Early,
    /// An earlier kernel of the run has given up; see [`ExpertMailbox::given_up`].
    GivenUp,
}

/// Answer to the device about a layer of a run.
#[derive(Clone, Copy)]
pub struct ExpertAnswer<'a> {
    /// Future slot of each pair's expert `[k]`; null for an expert that the host computes.
    pub slots: &'a [DevicePtr<u8>],
    /// Indices, in all tables, of experts that are no longer on the device, at most `2 * room`.
    pub gone: &'a [u32],
    /// [`ExpertFetch::room`] of the kernel.
    pub room: usize,
}

/// An expert that goes back to pinned memory.
pub struct ExpertReturn<R> {
    /// Parts of the expert on the device, at multiples of 16.
    pub from: [DevicePtr<u8>; 3],
    /// The memory that the expert goes to, and the byte ranges of its parts there.
    pub to: R,
    pub ranges: [Range<usize>; 3],
}

struct ReturnUnderWay<R> {
    to: R,
    run: u32,
    place: usize,
    /// Value of [`Gpu::queued`] when the answer was given.
    queued: u64,
}

/// An expert that has to be copied to the device.
#[derive(Clone, Copy)]
pub struct ExpertMiss<'a> {
    /// Index in the layer's table, if the expert stays on the device.
    pub stays_as: Option<u32>,
    pub to: DevicePtr<u8>,
    /// Its parts in pinned memory, as long as the layer's parts. They must not change until the kernel has run. `None` if an
    /// earlier kernel has copied them to `to`.
    pub from: Option<[&'a [u8]; 3]>,
}

impl<R: AsMut<[u8]> + Send + 'static> ExpertMailbox<R> {
    /// Creates a mailbox for `layers`, and runs with up to `pairs_max` pairs of a row and an expert. The host computes
    /// some of them from states of `hidden` values, unless that is 0.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if there are more pairs than [`FETCHED_PAIRS_MAX`], or if parts are not aligned to 16 bytes or do not lie in
    /// their slots.
    pub fn new(
        gpu: &Gpu,
        tables: Arc<AddressTables>,
        layers: Vec<FetchedLayer>,
        pairs_max: usize,
        hidden: usize,
    ) -> Result<ExpertMailbox<R>, CudaError> {
        assert!((1..=FETCHED_PAIRS_MAX).contains(&pairs_max), "{pairs_max} pairs");
        assert!(hidden.is_multiple_of(4), "16 bytes are copied at once");
        for layer in &layers {
            let table = tables.table(layer.table);
            for slots in [layer.slots, layer.present].map(|index| tables.table(index)) {
                let is_enough =
                    slots.len() >= table.len() && slots.slot_bytes() <= table.slot_bytes();
                assert!(is_enough, "chosen slots");
            }
            let is_right = |(at, bytes): &(u64, u64)| {
                at.is_multiple_of(16) && at + bytes <= table.slot_bytes() && *bytes < 1 << 31
            };
            assert!(layer.parts.iter().all(is_right), "parts {:?} of a slot", layer.parts);
        }
        let places = layers.len();
        let asked_words = (4 + pairs_max).next_multiple_of(LINE_WORDS);
        let done_at = asked_words + answer_words(pairs_max).next_multiple_of(LINE_WORDS);
        let place_words = done_at + LINE_WORDS;
        let x_at = places * place_words;
        let given_up_at = (x_at + (1 + pairs_max) * hidden).next_multiple_of(LINE_WORDS);
        let words = gpu.host_words(given_up_at + LINE_WORDS)?;
        Ok(ExpertMailbox {
            words,
            tables,
            layers,
            returning: VecDeque::with_capacity(2 * pairs_max),
            seen: (0, 0),
            pairs_max,
            asked_words,
            done_at,
            place_words,
            hidden,
            x_at,
            given_up_at,
        })
    }

    /// Returns the table to which the kernel of a place writes the addresses of the chosen experts.
    pub fn slots(&self, place: usize) -> AddressTable {
        self.tables.table(self.layers[place].slots)
    }

    /// Returns memory that an expert went back to, once the kernel has written it. The kernel has run if a later
    /// question of the same run has come, or if the host has waited for `gpu` since the answer.
    pub fn returned(&mut self, gpu: &Gpu) -> Option<R> {
        let first = self.returning.front()?;
        let is_behind = if first.run == self.seen.0 { first.place < self.seen.1 } else { false };
        if !is_behind && first.queued > gpu.finished() {
            return None;
        }
        let first = self.returning.pop_front()?;
        // The answer is cleared, so that a kernel which is queued for it only now does not find it.
        let at = first.place * self.place_words + self.asked_words;
        if self.words.load_acquire(at) == first.run {
            self.words.store_release(at, 0);
        }
        Some(first.to)
    }

    /// Copies the state `[hidden]` that came with the last question that waits.
    ///
    /// # Panics
    /// Panics if `x` is not of that size.
    pub fn read_state(&self, x: &mut [f32]) {
        assert_eq!(x.len(), self.hidden);
        self.words.read(self.x_at, x);
    }

    /// Writes the output row of pair number `pair` to where [`Gpu::take_rows`] finds it. The rows of the
    /// previous layer must have been taken.
    ///
    /// # Panics
    /// Panics if there is no such row.
    pub fn write_row(&mut self, pair: usize, row: &[f32]) {
        assert!(pair < self.pairs_max && row.len() == self.hidden);
        self.words.write(self.x_at + (1 + pair) * self.hidden, row);
    }

    /// Tells the kernel that all rows of run `run` have been written.
    pub fn rows_are_there(&mut self, place: usize, run: u32) {
        self.words.store_release(place * self.place_words + self.done_at, run);
    }

    /// Returns the place where run `run` has given up, if it has. The answer is final once the run's work has ended.
    pub fn given_up(&self, run: u32) -> Option<usize> {
        if self.words.load_acquire(self.given_up_at) != run {
            return None;
        }
        let mut place = [0_u32];
        self.words.read(self.given_up_at + 1, &mut place);
        Some(place[0] as usize)
    }

    /// Resets the record that a run has given up, so that it can go on. No work of the run may be queued.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn forget_given_up(&mut self, gpu: &Gpu, of: &GivingUp) -> Result<(), CudaError> {
        self.words.store_release(self.given_up_at, 0);
        gpu.fill(of.run.cast(), 0, size_of::<u32>())
    }

    /// Queues a copy of the state `[hidden]` to where [`ExpertMailbox::read_state`] finds it.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn queue_state(&self, gpu: &Gpu, x: DevicePtr<f32>) -> Result<(), CudaError> {
        gpu.queue_download(x.cast(), &self.words, self.x_at..self.x_at + self.hidden)
    }

    /// Copies the ids that the rows of run `run` have chosen in a layer to `ids`, which has one element for each pair, and
    /// returns the kernel's question. Returns `None` if the question has not come yet.
    ///
    /// # Panics
    /// Panics if `ids` has too many elements.
    pub fn question(&mut self, place: usize, run: u32, ids: &mut [u32]) -> Option<ExpertQuestion> {
        assert!(ids.len() <= self.pairs_max, "{} pairs", ids.len());
        let at = place * self.place_words;
        if self.words.load_acquire(at) != run {
            return None;
        }
        let mut wanted = [0_u32];
        self.words.read(at + 1, &mut wanted);
        self.words.read(at + 4, ids);
        let question = match wanted[0] {
            0 => ExpertQuestion::Resident,
            1 => ExpertQuestion::Waiting,
            EARLY => {
                self.seen = (run, place.saturating_sub(1));
                return Some(ExpertQuestion::Early);
            }
            _ => return Some(ExpertQuestion::GivenUp),
        };
        self.seen = (run, place);
        Some(question)
    }

    /// Returns the nanoseconds that a layer waited for its answer and those that it copied. They are valid once the
    /// work after it has run.
    pub fn times(&self, place: usize) -> [u32; 2] {
        let mut times = [0; 2];
        self.words.read(place * self.place_words + 2, &mut times);
        times
    }

    /// Answers the question of run `run`, once. [`ExpertMailbox::returned`] returns the memory of experts that go back.
    ///
    /// # Panics
    /// Panics if there are more entries than possible, if an address is not that of a whole slot, or if an index is
    /// not in the tables. Panics if memory is not part of `pinned` or is not as long as the parts.
    #[allow(clippy::too_many_arguments, reason = "an answer and what proves it, each once")]
    pub fn answer<'m>(
        &mut self,
        gpu: &Gpu,
        place: usize,
        run: u32,
        answer: &ExpertAnswer<'_>,
        misses: impl Iterator<Item = ExpertMiss<'m>>,
        returns: impl ExactSizeIterator<Item = ExpertReturn<R>>,
        pinned: &Pinned,
    ) {
        let ExpertAnswer { slots, gone, room } = *answer;
        let (k, returned, mut missed) = (slots.len(), returns.len(), 0);
        assert!(k <= room && room <= self.pairs_max, "{k} pairs, room for {room}");
        assert!(gone.len() <= 2 * room && returned <= room, "more than there is room for");
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
        let first_miss = at + 4 + 2 * room;
        for miss in misses {
            assert!(missed < room, "more than there is room for");
            let at = first_miss + MISS_WORDS * missed;
            missed += 1;
            assert!(miss.stays_as.is_none_or(|expert| (expert as usize) < table.len()));
            self.tables.check(&table, miss.to.address());
            assert!(!miss.to.is_null(), "an expert goes nowhere");
            let is_whole = |(from, part): (&&[u8], &(u64, u64))| from.len() as u64 == part.1;
            let is_right = |from: [&[u8]; 3]| from.iter().zip(&parts).all(is_whole);
            assert!(miss.from.is_none_or(is_right), "parts of other lengths");
            let stays_as = miss.stays_as.map_or(u32::MAX, |expert| first as u32 + expert);
            words.write(at, &[stays_as, 0]);
            words.write(at + 2, &[miss.to.address()]);
            let from = miss.from.map(|from| from.map(|part| pinned.device_address(part)));
            words.write(at + 4, &from.unwrap_or([0; 3]));
        }
        words.write(first_miss + MISS_WORDS * room, gone);
        let first_return = first_miss + (MISS_WORDS + 2) * room;
        for (i, back) in returns.enumerate().take(room) {
            let ExpertReturn { from, mut to, ranges } = back;
            let at = first_return + RETURN_WORDS * i;
            let bytes = ranges.clone().map(|range| range.len());
            from.iter().zip(bytes).for_each(|(from, bytes)| from.check(bytes));
            words.write(at, &from.map(|part| part.address()));
            let memory = to.as_mut();
            let first = memory.as_ptr();
            words.write(at + 6, &ranges.map(|range| pinned.device_address(&memory[range])));
            words.write(at + 12, &bytes.map(|bytes| bytes as u32));
            // Only `returning` holds the memory until it comes back. Moving the value must not move its bytes.
            self.returning.push_back(ReturnUnderWay { to, run, place, queued: gpu.queued() });
            let last = self.returning.back_mut().map(|last| last.to.as_mut().as_ptr());
            assert_eq!(last, Some(first), "memory that an expert goes back to has moved");
        }
        let counts = [(room << 16 | missed) as u32, gone.len() as u32, returned as u32];
        words.write(at + 1, &counts);
        words.store_release(at, run);
    }
}

impl Gpu {
    /// Queues a kernel that writes the addresses of the chosen experts that are on the device to the table
    /// [`FetchedLayer::present`]. The next call of [`Gpu::fetch_experts`] with a side stream must be for the same choice. If
    /// `asks`, the kernel also sends the ids to the host, so that it may answer before the experts are fetched. With no
    /// pairs, that only tells the host how far the run is.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn find_experts<R: AsMut<[u8]> + Send + 'static>(
        &self,
        fetch: &ExpertFetch,
        mailbox: &ExpertMailbox<R>,
        place: usize,
        asks: bool,
    ) -> Result<(), CudaError> {
        let (k, tables) = (fetch.k, &mailbox.tables);
        let FetchedLayer { table, present, .. } = mailbox.layers[place];
        let (table, present) = (tables.table(table), tables.table(present));
        assert!(k <= mailbox.pairs_max, "{k} pairs");
        let launch = Launch::new(self.kernel("fetch", "find_experts")?, (1, 1, 1), (THREADS, 1, 1))
            .choice(fetch, tables, &table)
            .ptr(present.first(), table.len());
        let launch = match asks {
            true => launch.ptr(mailbox.words.device(place * mailbox.place_words), 4 + k),
            false => launch.null(),
        };
        launch.run(self)
    }

    /// Queues a kernel that requests the missing experts from the host through place `place` of the mailbox, waits for
    /// the answer and copies them. The host must call [`ExpertMailbox::answer`] before, or each time the kernel runs
    /// and waits. With a side stream, the kernel runs there, after the last fork. The table of chosen experts then names
    /// only those that were missing; [`Gpu::find_experts`] has named the others.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn fetch_experts<R: AsMut<[u8]> + Send + 'static>(
        &self,
        fetch: &ExpertFetch,
        mailbox: &ExpertMailbox<R>,
        place: usize,
        side: Option<&SideStream>,
    ) -> Result<(), CudaError> {
        let (k, tables) = (fetch.k, &mailbox.tables);
        let FetchedLayer { table, slots, parts, .. } = mailbox.layers[place];
        let table = tables.table(table);
        assert!(fetch.blocks >= 2, "some copy in, some out");
        let room = fetch.room;
        assert!(k <= room && room <= mailbox.pairs_max, "{k} pairs, room for {room}");
        let asked = mailbox.words.device(place * mailbox.place_words);
        let (x, x_host) = match mailbox.hidden {
            0 => (DevicePtr::null(), DevicePtr::null()),
            _ => (fetch.x, mailbox.words.device(mailbox.x_at)),
        };
        let [one, two, three] = parts;
        let hidden = if fetch.x.is_null() { 0 } else { mailbox.hidden };
        let asked_words = 4 + k;
        Launch::new(self.kernel("fetch", "fetch_experts")?, (fetch.blocks, 1, 1), (THREADS, 1, 1))
            .shared(4 * answer_words(room) as u32)
            .choice(fetch, tables, &table)
            .int(room)
            .int(usize::from(fetch.always))
            .ptr(tables.table(slots).first(), table.len())
            .int(usize::from(side.is_some()))
            .ptr(fetch.tickets, 2)
            .ptr(fetch.desk, ExpertFetch::desk_words(room))
            .ptr(asked, asked_words)
            .ptr(asked.offset(mailbox.asked_words), answer_words(room))
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
            .run_beside(self, side)
    }

    /// Queues a kernel that copies output rows which the host computes to `out [k, hidden]`. These are the rows of the
    /// chosen experts whose slot is null. If there are any, [`ExpertMailbox::rows_are_there`] must follow each run of
    /// the kernel.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn take_rows<R: AsMut<[u8]> + Send + 'static>(
        &self,
        fetch: &ExpertFetch,
        mailbox: &ExpertMailbox<R>,
        place: usize,
        out: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        let words = &mailbox.words;
        let (k, hidden) = (fetch.k, mailbox.hidden);
        assert!(k <= mailbox.pairs_max, "{k} pairs");
        let slots = mailbox.slots(place);
        Launch::new(self.kernel("fetch", "take_rows")?, (k as u32, 1, 1), (256, 1, 1))
            .ptr(fetch.now, 2)
            .ptr(fetch.ids, k)
            .ptr(slots.first(), slots.len())
            .ptr(words.device(place * mailbox.place_words + mailbox.done_at), 1)
            .ptr(words.device(mailbox.x_at + hidden), k * hidden)
            .ptr(out, k * hidden)
            .int(hidden)
            .giving_up(fetch, words, mailbox.given_up_at, place)
            .run(self)
    }
}

impl Launch {
    /// Passes the arguments with which kernels that look up the experts of a layer begin.
    fn choice(self, fetch: &ExpertFetch, tables: &AddressTables, table: &AddressTable) -> Launch {
        self.ptr(fetch.now, 2)
            .ptr(fetch.ids, fetch.k)
            .ptr(fetch.forced, fetch.k)
            .int(fetch.k)
            .ptr(tables.all(), table.number() + table.len())
            .int(table.number())
    }

    /// Passes the arguments with which kernels that wait for the host end.
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
