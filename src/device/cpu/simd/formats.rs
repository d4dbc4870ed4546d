//! Compile-time description of each quantized format, over which the matmul micro-kernels are generic.

#![forbid(unsafe_code)]

use crate::device::cpu::weights::pack::Scheme;
use crate::weights::DType;

/// A quantized format as a type.
pub(super) trait Format {
    const SCHEME: Scheme;
}

macro_rules! formats {
    ($($name:ident)*) => {$(
        #[allow(non_camel_case_types)]
        pub(super) struct $name;
        impl Format for $name {
            const SCHEME: Scheme = match Scheme::for_dtype(DType::$name) {
                Some(scheme) => scheme,
                None => panic!("a quantized type"),
            };
        }
    )*};
}
formats!(Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K);

/// Calls a function generic over [`Format`] for the format of a [`DType`].
macro_rules! with_format {
    ($dtype:expr, $function:ident::<_ $(, $rest:tt)*>($($argument:expr),*)) => {{
        use crate::device::cpu::simd::formats;
        use crate::weights::DType;
        match $dtype {
            DType::Q8_0 => $function::<formats::Q8_0 $(, $rest)*>($($argument),*),
            DType::Q4_0 => $function::<formats::Q4_0 $(, $rest)*>($($argument),*),
            DType::Q4_1 => $function::<formats::Q4_1 $(, $rest)*>($($argument),*),
            DType::Q5_0 => $function::<formats::Q5_0 $(, $rest)*>($($argument),*),
            DType::Q5_1 => $function::<formats::Q5_1 $(, $rest)*>($($argument),*),
            DType::Q4_K => $function::<formats::Q4_K $(, $rest)*>($($argument),*),
            DType::Q5_K => $function::<formats::Q5_K $(, $rest)*>($($argument),*),
            DType::Q6_K => $function::<formats::Q6_K $(, $rest)*>($($argument),*),
            DType::F32 | DType::F16 | DType::BF16 => unreachable!("float weights have no integer body"),
        }
    }};
}
pub(super) use with_format;
