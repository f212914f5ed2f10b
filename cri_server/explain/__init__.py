"""What errors mean and what to do about them: each class of errors, each finding of `doctor`, and
the kernel's commonest words have a stable name and a page. docs/errors.md is made from them."""
