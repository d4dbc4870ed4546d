//! The streams of a card, and the events that callers record on them: real events, used again once they are reached.

#![forbid(unsafe_code)]

use ascend_sys::{AscendError, AscendErrorKind, Context, Event, EventKind, Stream};

use crate::device::ascend::memory::staging::Mark;
use crate::device::ascend::worker::wait::WaitPolicy;

/// Events a caller can hold without one of them having to be waited for when the next is recorded.
const EVENTS: usize = 128;

/// A stream with the count of what was staged on it.
#[derive(Debug)]
struct StreamEvents {
    stream: Stream,
    /// Joins this stream to whoever waits for all.
    joint: Event,
    staged: u64,
}

/// A recorded event: which number it stands for, and what its stream had been given by then.
#[derive(Debug)]
struct Recorded {
    event: Event,
    number: u64,
    mark: Mark,
    is_reached: bool,
}

/// All streams that callers know.
#[derive(Debug)]
pub(crate) struct Streams {
    context: Context,
    lanes: Vec<StreamEvents>,
    ring: Vec<Recorded>,
}

impl Streams {
    pub(crate) fn new(context: &Context) -> Result<Self, AscendError> {
        let nothing = Mark { stream: 0, count: 0 };
        let recorded = |_| {
            let event = Event::new(context, EventKind::Ordering)?;
            Ok(Recorded { event, number: 0, mark: nothing, is_reached: true })
        };
        let ring = (0..EVENTS).map(recorded).collect::<Result<_, AscendError>>()?;
        Ok(Self { context: context.clone(), lanes: Vec::new(), ring })
    }

    /// Makes stream number `index`, the next one, unless an attempt in which another card failed has left it.
    pub(crate) fn add(&mut self, index: usize) -> Result<(), AscendError> {
        if self.lanes.len() <= index {
            let stream = Stream::new(&self.context)?;
            let joint = Event::new(&self.context, EventKind::Ordering)?;
            self.lanes.push(StreamEvents { stream, joint, staged: 0 });
        }
        Ok(())
    }

    pub(crate) fn get(&self, index: usize) -> &Stream {
        &self.lanes[index].stream
    }

    /// Counts one more staged copy.
    pub(crate) fn next_mark(&mut self, index: usize) -> Mark {
        self.lanes[index].staged += 1;
        Mark { stream: index, count: self.lanes[index].staged }
    }

    /// Records event number `number` on a stream. What the slot stood for before is waited for: only a caller that is
    /// [`EVENTS`] events ahead of the device meets this.
    pub(crate) fn record(&mut self, index: usize, number: u64, wait_policy: &WaitPolicy) -> Result<(), AscendError> {
        let mark = Mark { stream: index, count: self.lanes[index].staged };
        let slot = &mut self.ring[slot_of(number)];
        if !slot.is_reached {
            wait_policy.wait(|limit| slot.event.synchronize(Some(limit)))?;
        }
        self.lanes[index].stream.record(&slot.event)?;
        (slot.number, slot.mark, slot.is_reached) = (number, mark, false);
        Ok(())
    }

    /// The event, unless it was reached long ago.
    fn pending(&self, number: u64) -> Option<&Recorded> {
        Some(&self.ring[slot_of(number)]).filter(|slot| slot.number == number && !slot.is_reached)
    }

    /// Lets a stream wait for an event.
    pub(crate) fn wait(&self, index: usize, number: u64) -> Result<(), AscendError> {
        self.hold(self.get(index), number)
    }

    /// Lets a stream of the card's own wait for an event.
    pub(crate) fn hold(&self, stream: &Stream, number: u64) -> Result<(), AscendError> {
        self.pending(number).map_or(Ok(()), |slot| stream.wait(&slot.event))
    }

    /// Lets a stream of the card's own wait for all work queued so far.
    pub(crate) fn hold_for_all(&self, stream: &Stream) -> Result<(), AscendError> {
        self.lanes.iter().try_for_each(|lane| {
            lane.stream.record(&lane.joint)?;
            stream.wait(&lane.joint)
        })
    }

    /// Blocks the host until an event is reached; gives what its stream has passed then.
    pub(crate) fn wait_host(&mut self, number: u64, wait_policy: &WaitPolicy) -> Result<Option<Mark>, AscendError> {
        if let Some(slot) = self.pending(number) {
            match wait_policy.wait(|limit| slot.event.synchronize(Some(limit))) {
                // An install that cannot limit this wait can limit the wait for the whole stream.
                Err(error) if error.kind == AscendErrorKind::Unsupported => {
                    let stream = self.get(slot.mark.stream);
                    wait_policy.wait(|limit| stream.synchronize(Some(limit)))?;
                }
                other => other?,
            }
        }
        Ok(self.reached(number))
    }

    /// Notes that an event was reached, and with it all before it on its stream.
    pub(crate) fn reached(&mut self, number: u64) -> Option<Mark> {
        let slot = Some(&self.ring[slot_of(number)]).filter(|slot| slot.number == number)?;
        let mark = slot.mark;
        for other in &mut self.ring {
            other.is_reached |= other.mark.stream == mark.stream && other.number <= number;
        }
        Some(mark)
    }

    /// Notes that all work is done; gives what each stream has passed.
    pub(crate) fn all_reached(&mut self) -> impl Iterator<Item = Mark> + use<'_> {
        self.ring.iter_mut().for_each(|slot| slot.is_reached = true);
        self.lanes.iter().enumerate().map(|(stream, lane)| Mark { stream, count: lane.staged })
    }

    /// Blocks the host until one stream is at its end.
    pub(crate) fn synchronize(&self, index: usize, wait_policy: &WaitPolicy) -> Result<Mark, AscendError> {
        wait_policy.wait(|limit| self.get(index).synchronize(Some(limit)))?;
        Ok(Mark { stream: index, count: self.lanes[index].staged })
    }

    /// Blocks the host until all streams are at their ends.
    pub(crate) fn synchronize_all(&self, wait_policy: &WaitPolicy) -> Result<(), AscendError> {
        self.lanes.iter().try_for_each(|lane| wait_policy.wait(|limit| lane.stream.synchronize(Some(limit))))
    }

    /// Ends what runs and drops what waits, so that nothing has to be waited for.
    pub(crate) fn abort(&self) {
        for lane in &self.lanes {
            // Nothing more can be done about a stream that does not even abort.
            let _ = lane.stream.abort();
        }
    }
}

fn slot_of(number: u64) -> usize {
    usize::try_from(number % EVENTS as u64).unwrap_or(0)
}
