//! The streams of a card, and the events that callers record on them: real events, which are reused once they are
//! reached.

#![forbid(unsafe_code)]

use ascend_sys::{AscendError, AscendErrorKind, Context, Event, EventKind, Stream};

use crate::device::ascend::memory::staging::Mark;
use crate::device::ascend::worker::wait::WaitPolicy;

/// Number of events that a caller can hold before recording the next one waits for the oldest.
const EVENTS: usize = 128;

/// A stream, its events, and the number of copies staged on it.
#[derive(Debug)]
struct StreamEvents {
    stream: Stream,
    /// Event by which other streams wait for all work queued on this stream.
    joint: Event,
    staged: u64,
}

/// A recorded event: its number, and the progress of its stream at that point.
#[derive(Debug)]
struct Recorded {
    event: Event,
    number: u64,
    mark: Mark,
    is_reached: bool,
}

/// All streams of callers.
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

    /// Creates stream number `index`, the next one, unless it exists from an attempt in which another card failed.
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

    /// Records event number `number` on a stream. Waits for the event that used the slot before, which happens only if
    /// the caller is [`EVENTS`] events ahead of the device.
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

    /// Returns the event if it may not have been reached yet.
    fn pending(&self, number: u64) -> Option<&Recorded> {
        Some(&self.ring[slot_of(number)]).filter(|slot| slot.number == number && !slot.is_reached)
    }

    /// Makes a stream wait for an event.
    pub(crate) fn wait(&self, index: usize, number: u64) -> Result<(), AscendError> {
        self.hold(self.get(index), number)
    }

    /// Makes one of the device's internal streams wait for an event.
    pub(crate) fn hold(&self, stream: &Stream, number: u64) -> Result<(), AscendError> {
        self.pending(number).map_or(Ok(()), |slot| stream.wait(&slot.event))
    }

    /// Makes one of the device's internal streams wait for all work queued so far.
    pub(crate) fn hold_for_all(&self, stream: &Stream) -> Result<(), AscendError> {
        self.lanes.iter().try_for_each(|lane| {
            lane.stream.record(&lane.joint)?;
            stream.wait(&lane.joint)
        })
    }

    /// Blocks the host until an event is reached; returns the progress of its stream.
    pub(crate) fn wait_host(&mut self, number: u64, wait_policy: &WaitPolicy) -> Result<Option<Mark>, AscendError> {
        if let Some(slot) = self.pending(number) {
            match wait_policy.wait(|limit| slot.event.synchronize(Some(limit))) {
                // A runtime without a limit for this wait may have one for the whole stream.
                Err(error) if error.kind == AscendErrorKind::Unsupported => {
                    let stream = self.get(slot.mark.stream);
                    wait_policy.wait(|limit| stream.synchronize(Some(limit)))?;
                }
                other => other?,
            }
        }
        Ok(self.reached(number))
    }

    /// Records that an event was reached, and with it all earlier ones of its stream.
    pub(crate) fn reached(&mut self, number: u64) -> Option<Mark> {
        let slot = Some(&self.ring[slot_of(number)]).filter(|slot| slot.number == number)?;
        let mark = slot.mark;
        for other in &mut self.ring {
            other.is_reached |= other.mark.stream == mark.stream && other.number <= number;
        }
        Some(mark)
    }

    /// Records that all work has ended; returns the progress of each stream.
    pub(crate) fn all_reached(&mut self) -> impl Iterator<Item = Mark> + use<'_> {
        self.ring.iter_mut().for_each(|slot| slot.is_reached = true);
        self.lanes.iter().enumerate().map(|(stream, lane)| Mark { stream, count: lane.staged })
    }

    /// Blocks the host until one stream is idle; returns its progress.
    pub(crate) fn synchronize(&self, index: usize, wait_policy: &WaitPolicy) -> Result<Mark, AscendError> {
        wait_policy.wait(|limit| self.get(index).synchronize(Some(limit)))?;
        Ok(Mark { stream: index, count: self.lanes[index].staged })
    }

    /// Blocks the host until all streams are idle.
    pub(crate) fn synchronize_all(&self, wait_policy: &WaitPolicy) -> Result<(), AscendError> {
        self.lanes.iter().try_for_each(|lane| wait_policy.wait(|limit| lane.stream.synchronize(Some(limit))))
    }

    /// Aborts running work and drops queued work, so that no wait is necessary.
    pub(crate) fn abort(&self) {
        for lane in &self.lanes {
            // A stream that cannot even be aborted has no further remedy.
            let _ = lane.stream.abort();
        }
    }
}

fn slot_of(number: u64) -> usize {
    usize::try_from(number % EVENTS as u64).unwrap_or(0)
}
