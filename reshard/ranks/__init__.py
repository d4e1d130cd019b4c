"""What ranks say to one another: verbs over small bytes, in which the first error reaches everybody."""
