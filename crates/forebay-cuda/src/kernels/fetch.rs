//! Experts that recorded work asks the host for, and copies from pinned memory by itself.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu, HostWords};

/// As in the kernel.
const THREADS: u32 = 512;
const CHOSEN_MAX: usize = 32;
const MISS_WORDS: usize = 10;
const RETURN_WORDS: usize = 16;
/// Of every question and every answer, so that none shares a line of a cache with another.
const LINE_WORDS: usize = 32;

/// One token's experts of a layer, as a kernel fetches them.
#[derive(Clone, Copy)]
pub struct ExpertFetch {
    /// `[2]`: the number of the run, as [`ExpertMailbox::answer`] gets it, never 0 nor that of the run before; and 1 if `forced`
    /// are chosen, else 0.
    pub now: DevicePtr<u32>,
    /// `[k]` each.
    pub ids: DevicePtr<u32>,
    pub forced: DevicePtr<u32>,
    pub k: usize,
    /// Addresses of the experts of all layers that are on the device and stay, 0 for the others; those of the layer begin
    /// with number `first`.
    pub tables: DevicePtr<u64>,
    pub first: usize,
    /// Gets the addresses of the chosen ones `[k]`, 0 where the answer says so.
    pub slots: DevicePtr<u64>,
    /// `[2]`, 0 before and after.
    pub tickets: DevicePtr<u32>,
    /// [`ExpertFetch::desk_words`] words, aligned to 16 bytes, the first of which is 0 before and after.
    pub desk: DevicePtr<u32>,
    /// The token's normed state `[hidden]`, if the mailbox takes it.
    pub x: DevicePtr<f32>,
    /// Where an expert's parts lie in its slot, each at a multiple of 16, and how many bytes they have.
    pub parts: [(u64, u64); 3],
    /// Blocks that copy.
    pub blocks: u32,
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

/// Pinned words for questions and answers, a place for each layer; and where the host computes, too, for what goes there
/// and comes back.
pub struct ExpertMailbox {
    words: HostWords,
    k: usize,
    /// Words of a place: those of the question, then those of the answer, then one that says that rows are there.
    asked_words: usize,
    done_at: usize,
    place_words: usize,
    /// Values of the state that comes with a question, and of a row that goes back; 0: none do.
    hidden: usize,
    x_at: usize,
}

/// What the device is told about a layer of a token's run.
#[derive(Clone, Copy)]
pub struct ExpertAnswer<'a> {
    /// Where the chosen experts will be `[k]`; null: somebody else computes with it.
    pub slots: &'a [DevicePtr<u8>],
    pub misses: &'a [ExpertMiss],
    /// Numbers of experts that are not on the device any more, at most `2 * k`.
    pub gone: &'a [u32],
    /// At most `k`. Nothing else reads or writes these places.
    pub returns: &'a [ExpertReturn],
}

/// An expert that goes back to pinned memory.
#[derive(Clone, Copy)]
pub struct ExpertReturn {
    /// Its parts, at multiples of 16.
    pub from: [DevicePtr<u8>; 3],
    /// Addresses of their places, as the device sees them.
    pub to: [u64; 3],
    pub bytes: [u32; 3],
}

/// An expert that has to be copied.
#[derive(Clone, Copy)]
pub struct ExpertMiss {
    /// Its number in the tables, if it stays.
    pub stays_as: Option<u32>,
    pub to: DevicePtr<u8>,
    /// Addresses of its parts, as the device sees them.
    pub from: [u64; 3],
}

impl ExpertMailbox {
    /// For `places` layers whose tokens choose `k` experts, at most 32. The host computes some of them from states of
    /// `hidden` values, unless that is 0.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn new(
        gpu: &Gpu,
        places: usize,
        k: usize,
        hidden: usize,
    ) -> Result<ExpertMailbox, CudaError> {
        assert!((1..=CHOSEN_MAX).contains(&k), "a token chooses {k} experts");
        assert!(hidden.is_multiple_of(4), "16 bytes are copied at once");
        let asked_words = (4 + k).next_multiple_of(LINE_WORDS);
        let done_at = asked_words + answer_words(k).next_multiple_of(LINE_WORDS);
        let place_words = done_at + LINE_WORDS;
        let x_at = places * place_words;
        let words = gpu.host_words(x_at + (1 + k) * hidden)?;
        Ok(ExpertMailbox { words, k, asked_words, done_at, place_words, hidden, x_at })
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

    /// The ids that the token of run `run` has chosen in a layer, if they have come, and whether an answer is waited for.
    ///
    /// # Panics
    /// When `ids` is not for `k`.
    pub fn question(&self, place: usize, run: u32, ids: &mut [u32]) -> Option<bool> {
        assert_eq!(ids.len(), self.k);
        let at = place * self.place_words;
        if self.words.load_acquire(at) != run {
            return None;
        }
        let mut is_waiting = [0_u32];
        self.words.read(at + 1, &mut is_waiting);
        self.words.read(at + 2, ids);
        Some(is_waiting[0] != 0)
    }

    /// Nanoseconds that a layer waited for its answer, and that it copied, once what follows it has run.
    pub fn times(&self, place: usize) -> [u32; 2] {
        let mut times = [0; 2];
        self.words.read(place * self.place_words + 2 + self.k, &mut times);
        times
    }

    /// Answers the question of run `run`, once.
    ///
    /// # Panics
    /// With more than there can be.
    pub fn answer(&mut self, place: usize, run: u32, answer: &ExpertAnswer<'_>) {
        let (k, ExpertAnswer { slots, misses, gone, returns }) = (self.k, *answer);
        assert!(slots.len() == k && misses.len() <= k && gone.len() <= 2 * k && returns.len() <= k);
        let at = place * self.place_words + self.asked_words;
        let words = &mut self.words;
        words.write(at + 1, &[misses.len() as u32, gone.len() as u32, returns.len() as u32]);
        for (i, slot) in slots.iter().enumerate() {
            words.write(at + 4 + 2 * i, &[slot.address()]);
        }
        let first = at + 4 + 2 * k;
        for (i, miss) in misses.iter().enumerate() {
            let at = first + MISS_WORDS * i;
            words.write(at, &[miss.stays_as.unwrap_or(u32::MAX), 0]);
            words.write(at + 2, &[miss.to.address()]);
            words.write(at + 4, &miss.from);
        }
        words.write(first + MISS_WORDS * k, gone);
        let first = first + (MISS_WORDS + 2) * k;
        for (i, back) in returns.iter().enumerate() {
            let at = first + RETURN_WORDS * i;
            words.write(at, &back.from.map(|part| part.address()));
            words.write(at + 6, &back.to);
            words.write(at + 12, &back.bytes);
        }
        words.store_release(at, run);
    }
}

impl Gpu {
    /// Queues a kernel that asks the host, through place `place` of the mailbox, for the experts that are not on the device, waits
    /// for the answer and copies them. [`ExpertMailbox::answer`] must follow each time it runs and waits.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn fetch_experts(
        &self,
        fetch: &ExpertFetch,
        mailbox: &ExpertMailbox,
        place: usize,
    ) -> Result<(), CudaError> {
        assert_eq!(fetch.k, mailbox.k);
        assert!(fetch.blocks >= 2, "some copy in, some out");
        assert!(fetch.parts.iter().all(|(at, _)| at.is_multiple_of(16)), "{:?}", fetch.parts);
        let asked = mailbox.words.device(place * mailbox.place_words);
        let (x, x_host) = match mailbox.hidden {
            0 => (DevicePtr::null(), DevicePtr::null()),
            _ => (fetch.x, mailbox.words.device(mailbox.x_at)),
        };
        let [one, two, three] = fetch.parts;
        Launch::new(self.kernel("fetch", "fetch_experts")?, (fetch.blocks, 1, 1), (THREADS, 1, 1))
            .ptr(fetch.now)
            .ptr(fetch.ids)
            .ptr(fetch.forced)
            .int(fetch.k)
            .ptr(fetch.tables)
            .int(fetch.first)
            .ptr(fetch.slots)
            .ptr(fetch.tickets)
            .ptr(fetch.desk)
            .ptr(asked)
            .ptr(asked.offset(mailbox.asked_words))
            .ptr(x)
            .ptr(x_host)
            .int(mailbox.hidden)
            .u64(one.0)
            .u64(two.0)
            .u64(three.0)
            .int(one.1 as usize)
            .int(two.1 as usize)
            .int(three.1 as usize)
            .run(self)
    }

    /// Queues a kernel that brings rows of outputs which the host computes to `out [k, hidden]`: those of the chosen experts
    /// whose slot is null. [`ExpertMailbox::rows_are_there`] must follow each time it runs and there are such.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn take_rows(
        &self,
        fetch: &ExpertFetch,
        mailbox: &ExpertMailbox,
        place: usize,
        out: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        let words = &mailbox.words;
        let grid = (fetch.k as u32, 1, 1);
        Launch::new(self.kernel("fetch", "take_rows")?, grid, (256, 1, 1))
            .ptr(fetch.now)
            .ptr(fetch.slots)
            .ptr(words.device(place * mailbox.place_words + mailbox.done_at))
            .ptr(words.device(mailbox.x_at + mailbox.hidden))
            .ptr(out)
            .int(mailbox.hidden)
            .run(self)
    }
}
