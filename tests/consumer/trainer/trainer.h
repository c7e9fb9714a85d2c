#error "a header of the user's that bears the name of one of fulgur's, which fulgur must not include"
